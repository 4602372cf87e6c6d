"""POST /v1/chat/completions: the shape of its choices."""

from collections.abc import Iterable
from typing import Any

from kvasir.router.openai.conversation import echoed_text
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.logprobs import chat_logprobs, prompt_logprobs
from kvasir.router.openai.models import ChatBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.text.parts import CallArguments, CallStart, Content, Part, Reasoning
from kvasir.router.text.tokenizer import TextTokenizer


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, prompt: Prompt, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_choices = body.num_choices
        self._has_logprobs = body.logprobs or False
        self._top_logprobs = body.top_logprobs or 0
        self._return_token_ids = body.return_token_ids or False
        self.says_more_than_text = self._has_logprobs or self._return_token_ids
        self._echoed = echoed_text(body)
        self._shows_reasoning = body.include_reasoning is not False
        self._prompt_logprobs = body.prompt_logprobs
        self.extra: dict[str, Any] = {"prompt_token_ids": prompt.token_ids} if self._return_token_ids else {}

    def openings(self, first: ChoiceDelta) -> list[dict[str, Any]]:
        """In their order: OpenAI's own client looks a choice up by its index among those that it has seen before."""
        messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if self._echoed:
            messages.append({"content": self._echoed})
        return [_chunk(index, message) for message in messages for index in range(self._num_choices)]

    def piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if delta.parts is None:
            message: dict[str, Any] = {"content": delta.text} if delta.text else {}
        else:
            message = self._message([delta])
        choice = _chunk(delta.index, message)
        if self._has_logprobs and delta.token_ids:
            choice["logprobs"] = chat_logprobs(delta.logprobs, self._top_logprobs, self._tokenizer)
        if self._return_token_ids and delta.token_ids:
            choice["token_ids"] = delta.token_ids
        if not message and (choice["logprobs"] or "token_ids" in choice):
            message["content"] = ""
        return choice if message else None

    def closing(self, last: ChoiceDelta) -> dict[str, Any]:
        return _chunk(last.index, {}, last.finish_reason) | {"stop_reason": last.stop_reason}

    def whole(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        # Beside the choices, and once: all of them have one prompt.
        if self._prompt_logprobs is not None and "prompt_logprobs" not in self.extra:
            scored = prompt_logprobs(deltas[0].prompt_logprobs, self._prompt_logprobs, self._tokenizer)
            self.extra["prompt_logprobs"] = scored
        message = self._message(deltas)
        for call in message.get("tool_calls", ()):
            del call["index"]
        if self._echoed or not message:
            message["content"] = self._echoed + message.get("content", "")
        positions = [position for delta in deltas for position in delta.logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": None, "refusal": None} | message,
            "logprobs": chat_logprobs(positions, self._top_logprobs, self._tokenizer) if self._has_logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _message(self, deltas: Iterable[ChoiceDelta]) -> dict[str, Any]:
        """What is there of content, reasoning, and calls."""
        parts: list[Part] = []
        for delta in deltas:
            parts += delta.parts if delta.parts is not None else [Content(delta.text)]
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        message: dict[str, Any] = {}
        if reasoning and self._shows_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}  # the newer name, and the older one
        if content:
            message["content"] = content
        if calls := _calls(parts):
            message["tool_calls"] = calls
        return message


def _calls(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Each call with what is new of it: id and name come with its start alone."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            calls[part.index] = {
                "index": part.index,
                "id": part.call_id,
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    return list(calls.values())


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
