"""What the ways to write calls of tools have in common: text in pieces to parts."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from hashlib import sha256

from kvasir.router.text.parts import CallArguments, CallEnd, CallStart, Content, Part, overlap
from kvasir.router.text.tools.call_reader import CallReader, Status
from kvasir.router.text.tools.json_value import JsonValue


class ToolFormat(ABC):
    """The parts depend on the text alone, never on where its pieces are cut.

    Markup is no content, and neither is the space between it and a content. What looked like a call but is none is
    content, as it stands.
    """

    markers: tuple[str, ...] = ()  # if they are special tokens: not shown to clients, but here they must be seen
    finish_reason = "tool_calls"  # of an answer that makes some

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools that there are."""
        self._names = frozenset(names)
        self.answer_id = uuid.uuid4().hex  # of what its calls are in: their ids follow from it
        self._held = ""
        self._parts: list[Part] = []
        self._num_calls = 0
        self._follows_call = False
        self._space = ""  # before the last marker
        self._opening = ""  # what stood before the object that is read
        self._reader = CallReader(0, "")
        self._value = JsonValue()  # arguments that are read
        # Reads from the start of what is held. False: it wants more text.
        self._step: Callable[[], bool] = self._first

    def push(self, text: str) -> list[Part]:
        self._held += text
        while self._held and self._step():
            pass
        return self._take_parts()

    def flush(self, *, is_cut: bool) -> list[Part]:
        """The text has ended; `is_cut`: by the limit of tokens. Half of a markup is then the rest of a call."""
        if self._step == self._read_call:
            if not self._reader.has_begun and not is_cut:
                self._show(self._opening + self._reader.raw)
        else:
            self._show_rest(is_cut)
        self._held = ""
        return self._take_parts()

    @abstractmethod
    def _first(self) -> bool: ...

    def _show_rest(self, is_cut: bool) -> None:
        """What is held outside of an object."""
        half = max((overlap(self._held, marker) for marker in self.markers), default=0) if is_cut else 0
        self._show(self._held[: len(self._held) - half])

    def _after_call(self) -> bool:
        self._step = self._first
        return True

    def _after_no_call(self) -> bool:
        self._step = self._first
        return True

    def new_call_id(self) -> str:
        return f"call_{self._next_digest()[:24]}"

    def _next_digest(self) -> str:
        return sha256(f"{self.answer_id}/{self._num_calls}".encode()).hexdigest()

    def _take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _show(self, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._parts.append(Content(text))

    def _find(self, marker: str) -> bool:
        """Shows what stands before the marker, and takes that; False: it has not come yet."""
        content, found, rest = self._held.partition(marker)
        if found:
            text = content.rstrip()
            self._space = content[len(text) :]
            self._show(text)
            self._held = rest
            return True
        end = len(self._held) - overlap(self._held, marker)
        end = len(self._held[:end].rstrip())
        self._show(self._held[:end])
        self._held = self._held[end:]
        return False

    def _begin_object(self, opening: str = "", names: Collection[str] | None = None) -> bool:
        self._opening = opening
        self._reader = CallReader(self._num_calls, self.new_call_id(), names)
        self._step = self._read_call
        return True

    def _read_call(self) -> bool:
        parts, num_chars = self._reader.push(self._held)
        self._parts += parts
        self._held = self._held[num_chars:]
        if self._reader.status is Status.READING:
            return False
        if self._reader.status is Status.NO_CALL:
            self._show(self._opening + self._reader.raw)
            return self._after_no_call()
        self._num_calls += 1
        self._follows_call = True
        return self._after_call()

    def _begin_arguments(self, name: str) -> bool:
        """They come next, with no object around them."""
        self._parts.append(CallStart(self._num_calls, self.new_call_id(), name))
        self._value = JsonValue()
        self._step = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        end = self._value.take(self._held)
        self._parts.append(CallArguments(self._num_calls, self._held[:end]))
        self._held = self._held[end:]
        if self._value.is_complete:
            self._parts.append(CallEnd(self._num_calls))
            self._num_calls += 1
            self._follows_call = True
            self._step = self._first
        return self._value.is_complete

    def _in_list(self) -> bool:
        """Behind the opening bracket, or a call."""
        self._held = self._held.lstrip(" \t\r\n,")
        if self._held.startswith("{"):
            return self._begin_object()
        if self._held:  # its end, or something that is no list of calls
            self._held = self._held.removeprefix("]")
            self._step = self._first
        return bool(self._held)
