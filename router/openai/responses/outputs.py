"""The items of a response's output while they are written, and the events that tell of it, in OpenAI's order."""

from abc import ABC, abstractmethod
from typing import Any

from kvasir.router.openai.responses.references import item_id

Event = dict[str, Any]  # without its sequence number


class OutputItem(ABC):
    """Opened, added to, and closed: each says which events tell of that."""

    def __init__(self, prefix: str, output_index: int, response_id: str) -> None:
        self.item_id = item_id(prefix, response_id, str(output_index))
        self._place = {"item_id": self.item_id, "output_index": output_index}
        self._output_index = output_index
        self._text = ""

    @abstractmethod
    def as_dict(self, status: str) -> dict[str, Any]: ...

    @abstractmethod
    def open(self) -> list[Event]: ...

    @abstractmethod
    def add(self, text: str) -> Event: ...

    @abstractmethod
    def close(self, status: str) -> list[Event]: ...

    def _added(self) -> Event:
        item = self.as_dict("in_progress")
        return {"type": "response.output_item.added", "output_index": self._output_index, "item": item}

    def _done(self, status: str) -> Event:
        item = self.as_dict(status)
        return {"type": "response.output_item.done", "output_index": self._output_index, "item": item}


class _OnePart(OutputItem):
    """An item whose content is one part of text."""

    _text_event = ""

    def __init__(self, prefix: str, output_index: int, response_id: str) -> None:
        super().__init__(prefix, output_index, response_id)
        self._in_part = {**self._place, "content_index": 0}
        self._has_part = False

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    def _extra(self) -> dict[str, Any]:
        """Beside the text, in the events of it."""
        return {}

    def open(self) -> list[Event]:
        added = self._added()
        self._has_part = True
        return [added, {"type": "response.content_part.added", **self._in_part, "part": self._part()}]

    def add(self, text: str) -> Event:
        self._text += text
        return {"type": f"{self._text_event}.delta", **self._in_part, "delta": text}

    def close(self, status: str) -> list[Event]:
        return [
            {"type": f"{self._text_event}.done", **self._in_part, "text": self._text, **self._extra()},
            {"type": "response.content_part.done", **self._in_part, "part": self._part()},
            self._done(status),
        ]


class MessageItem(_OnePart):
    _text_event = "response.output_text"

    def __init__(self, output_index: int, response_id: str) -> None:
        super().__init__("msg", output_index, response_id)
        self._logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> Event:
        self._logprobs += logprobs or []
        return super().add(text) | {"logprobs": logprobs or []}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": [*self._logprobs]}

    def _extra(self) -> dict[str, Any]:
        return {"logprobs": [*self._logprobs]}

    def as_dict(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._has_part else []
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


class ReasoningItem(_OnePart):
    _text_event = "response.reasoning_text"

    def __init__(self, output_index: int, response_id: str) -> None:
        super().__init__("rs", output_index, response_id)

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}

    def as_dict(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._has_part else []
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


class CallItem(OutputItem):
    def __init__(self, output_index: int, response_id: str, call_id: str, name: str) -> None:
        super().__init__("fc", output_index, response_id)
        self._call_id = call_id
        self._name = name

    def open(self) -> list[Event]:
        return [self._added()]

    def add(self, text: str) -> Event:
        self._text += text
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def close(self, status: str) -> list[Event]:
        done = {"type": "response.function_call_arguments.done", **self._place, "arguments": self._text}
        return [done | {"name": self._name}, self._done(status)]

    def as_dict(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._text,
        }
