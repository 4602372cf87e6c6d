"""One response: deltas of its choice to events, and at their end to the whole, which is what the events have told."""

import time
from collections.abc import Sequence
from typing import Any

from kvasir.router.openai.envelope import Envelope, Usage
from kvasir.router.openai.errors import error_body
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.logprobs import chat_logprobs
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.responses.outputs import CallItem, Event, MessageItem, OutputItem, ReasoningItem
from kvasir.router.text.parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import PositionLogprobs


class ResponseWriter:
    """`response` is what GET would show of it now."""

    def __init__(self, body: ResponsesBody, envelope: Envelope, tokenizer: TextTokenizer) -> None:
        self.response = response_of(body, envelope)
        self._id = envelope.response_id
        self._body = body
        self._tokenizer = tokenizer
        self._usage = Usage(sum(envelope.prompt_lengths))
        self._num_events = 0
        self._open: OutputItem | None = None
        self._pending: list[PositionLogprobs] = []  # of tokens whose text has not been seen yet

    def begin(self) -> list[Event]:
        return self._numbered([self._told("response.created"), self._told("response.in_progress")])

    def take(self, delta: ChoiceDelta) -> list[Event]:
        self._usage.add(delta)
        parts: Sequence[Part] = delta.parts if delta.parts is not None else [Content(delta.text)]
        self._note_logprobs(delta, parts)
        events = [event for part in parts for event in self._take_part(part)]
        if delta.finish_reason is not None:
            events += self._finish(is_cut=delta.finish_reason == "length")
        return self._numbered(events)

    def end(self) -> list[Event]:
        """After the last delta: the whole."""
        return self._numbered([self._told(f"response.{self.response['status']}")])

    def fail(self, error: Exception) -> list[Event]:
        """The error, in the shape that makes clients raise it, and the end of the response."""
        body = error_body(error)["error"]
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": body["message"]}}
        flat = {key: body[key] for key in ("code", "message", "param")}
        return self._numbered([{"type": "error", **flat, "error": body}, self._told("response.failed")])

    def _take_part(self, part: Part) -> list[Event]:
        match part:
            case Reasoning(text):
                return self._add(ReasoningItem, text)
            case Content(text):
                return self._add(MessageItem, text) if text else []
            case CallStart(_, call_id, name):
                self._pending = []  # of its markup
                return self._begin_item(CallItem(self._next_index(), self._id, call_id, name))
            case CallArguments(_, text):
                assert self._open is not None
                return [self._open.add(text)]
            case CallEnd():
                return self._close_item("completed")

    def _add(self, kind: type[MessageItem] | type[ReasoningItem], text: str) -> list[Event]:
        events = [] if isinstance(self._open, kind) else self._begin_item(kind(self._next_index(), self._id))
        assert self._open is not None
        if isinstance(self._open, MessageItem):
            logprobs = chat_logprobs(self._pending, self._body.top_logprobs or 0, self._tokenizer)
            events.append(self._open.add(text, logprobs["content"]))
            self._pending = []
        else:
            events.append(self._open.add(text))
        return events

    def _note_logprobs(self, delta: ChoiceDelta, parts: Sequence[Part]) -> None:
        """Those of the tokens that the message is made of."""
        is_message = all(isinstance(part, Content | Reasoning) for part in parts)
        if self._body.wants_logprobs and is_message:
            self._pending += delta.logprobs
            del self._pending[: delta.num_reasoning_tokens]

    def _finish(self, *, is_cut: bool) -> list[Event]:
        events = []
        if self._open is None and not self.response["output"] and not is_cut:
            events += self._begin_item(MessageItem(0, self._id))
        # What is open has come to its end with the answer; only a call has an end of its own, and has missed it.
        is_whole = not is_cut and not isinstance(self._open, CallItem)
        events += self._close_item("completed" if is_whole else "incomplete")
        self.response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = _usage_of(self._usage.as_dict())
        return events

    def _next_index(self) -> int:
        return len(self.response["output"]) + (self._open is not None)

    def _begin_item(self, item: OutputItem) -> list[Event]:
        events = self._close_item("completed")
        self._open = item
        return events + item.open()

    def _close_item(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        self.response["output"].append(item.as_dict(status))
        return item.close(status)

    def _told(self, kind: str) -> Event:
        return {"type": kind, "response": {**self.response, "output": [*self.response["output"]]}}

    def _numbered(self, events: list[Event]) -> list[Event]:
        start = self._num_events
        self._num_events += len(events)
        return [event | {"sequence_number": start + number} for number, event in enumerate(events)]


def response_of(body: ResponsesBody, envelope: Envelope) -> dict[str, Any]:
    """As it is before its first token."""
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    reasoning = body.reasoning
    return {
        "id": envelope.response_id,
        "object": "response",
        "created_at": envelope.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": envelope.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
        "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _plain(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()


def _usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """A chat completion's usage under a response's names."""
    details = usage.get("completion_tokens_details", {})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
