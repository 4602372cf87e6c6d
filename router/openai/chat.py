"""POST /v1/chat/completions: the shape of its choices."""

from typing import Any

from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.logprobs import chat_logprobs
from kvasir.router.openai.models import ChatBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.text.tokenizer import TextTokenizer


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatBody, prompt: Prompt, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._has_logprobs = body.logprobs or False
        self._top_logprobs = body.top_logprobs or 0
        self._return_token_ids = body.return_token_ids or False
        self.extra: dict[str, Any] = {"prompt_token_ids": prompt.token_ids} if self._return_token_ids else {}

    def opening(self, index: int) -> dict[str, Any] | None:
        return _chunk(index, {"role": "assistant", "content": ""})

    def piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        choice = _chunk(delta.index, {"content": delta.text})
        if self._has_logprobs and delta.token_ids:
            choice["logprobs"] = chat_logprobs(delta.logprobs, self._top_logprobs, self._tokenizer)
        if self._return_token_ids and delta.token_ids:
            choice["token_ids"] = delta.token_ids
        return choice if delta.text or choice["logprobs"] or "token_ids" in choice else None

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return _chunk(index, {}, finish_reason)

    def whole(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        positions = [position for delta in deltas for position in delta.logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(positions, self._top_logprobs, self._tokenizer) if self._has_logprobs else None,
            "finish_reason": deltas[-1].finish_reason,
        }
        if self._return_token_ids:
            choice["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
