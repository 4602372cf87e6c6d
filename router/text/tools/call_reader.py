"""One call written as a JSON object, read as its text comes."""

import json
from collections.abc import Callable, Collection
from enum import Enum

from kvasir.router.text.parts import CallArguments, CallEnd, CallStart, Part
from kvasir.router.text.tools.json_value import JsonValue

_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = ("name", *_ARGUMENTS, "type", "id")


class Status(Enum):
    READING = "reading"
    DONE = "done"
    NO_CALL = "no call"  # what was read, `raw`, is some other text


class CallReader:
    """Reads `{"name": "f", "arguments": {...}}`, whose members may come in either order.

    Arguments are passed on as they stand, as soon as the name is known; those that were written as a JSON string are
    unpacked. `names`: only these may be called without arguments, for any object may have a name; None: the markup
    around the object says that it is a call.
    """

    def __init__(self, index: int, call_id: str, names: Collection[str] | None = None) -> None:
        self.status = Status.READING
        self.raw = ""
        self.has_begun = False  # something of it was passed on
        self.is_complete = False  # its arguments are
        self._has_ended = False  # and that was said
        self._index = index
        self._call_id = call_id
        self._names = names
        self._name: str | None = None
        self._has_arguments = False
        self._arguments = ""  # not passed on yet
        self._are_plain = True  # an object, passed on as it comes; anything else is held until it is complete
        self._key = ""
        self._value = JsonValue()
        self._value_text = ""
        self._parts: list[Part] = []
        self._step: Callable[[str, int], int] = self._before_object

    def push(self, text: str) -> tuple[list[Part], int]:
        """What is new of the call, and how many characters of `text` it has taken."""
        position = 0
        in_token = (self._in_key, self._in_value)
        while position < len(text) and self.status is Status.READING:
            if text[position].isspace() and self._step not in in_token:
                position += 1
            else:
                position = self._step(text, position)
        if not self.has_begun:
            self.raw += text[:position]
        parts, self._parts = self._parts, []
        return parts, position

    def _before_object(self, text: str, position: int) -> int:
        return self._expect("{", text, position, self._before_key)

    def _before_key(self, text: str, position: int) -> int:
        if text[position] == "}":
            return self._end_of_object(position)
        self._value, self._value_text = JsonValue(), ""
        self._expect('"', text, position, self._in_key)
        return position

    def _in_key(self, text: str, position: int) -> int:
        position = self._take_value(text, position)
        if self._value.is_complete:
            self._key = _string(self._value_text) or ""
            self._step = self._before_colon
            if self._key not in _MEMBERS and not self.has_begun:
                self.status = Status.NO_CALL
        return position

    def _before_colon(self, text: str, position: int) -> int:
        return self._expect(":", text, position, self._before_value)

    def _before_value(self, text: str, position: int) -> int:
        self._value, self._value_text = JsonValue(), ""
        self._step = self._in_value
        if self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._are_plain = text[position] == "{"
        return position

    def _in_value(self, text: str, position: int) -> int:
        start, position = position, self._take_value(text, position)
        if self._key in _ARGUMENTS and not self.is_complete:
            self._arguments += text[start:position]
            self._value_text = ""
        if self._value.is_complete:
            self._step = self._after_value
            self._take_member()
        if self._has_arguments and self._name is not None and (self._are_plain or self.is_complete):
            self._pass_on()
        return position

    def _take_member(self) -> None:
        if self._key == "name" and self._name is None:
            self._name = _string(self._value_text)
            if not self._name:
                self.status = Status.NO_CALL
        elif self._key in _ARGUMENTS and not self.is_complete:
            if not self._are_plain:
                self._arguments = _unpacked(self._arguments)
            self.is_complete = True

    def _after_value(self, text: str, position: int) -> int:
        if text[position] == "}":
            return self._end_of_object(position)
        return self._expect(",", text, position, self._before_key)

    def _end_of_object(self, position: int) -> int:
        if self._name is None or not (self._has_arguments or self._names is None or self._name in self._names):
            self.status = Status.NO_CALL
            return position
        if not self._has_arguments:
            self._arguments, self.is_complete = "{}", True
            self._pass_on()
        self.status = Status.DONE
        return position + 1

    def _expect(self, char: str, text: str, position: int, then: Callable[[str, int], int]) -> int:
        if text[position] == char:
            self._step = then
            return position + 1
        # No JSON. What was passed on stays a call; whatever this is, it is none of its arguments.
        self.status = Status.DONE if self.has_begun else Status.NO_CALL
        return position

    def _pass_on(self) -> None:
        if not self.has_begun:
            assert self._name is not None
            self.has_begun = True
            self._parts.append(CallStart(self._index, self._call_id, self._name))
        if self._arguments:
            self._parts.append(CallArguments(self._index, self._arguments))
            self._arguments = ""
        if self.is_complete and not self._has_ended:
            self._has_ended = True
            self._parts.append(CallEnd(self._index))

    def _take_value(self, text: str, position: int) -> int:
        end = self._value.take(text, position)
        self._value_text += text[position:end]
        return end


def _string(text: str) -> str | None:
    """'"a\\u00e9"' -> 'aé'; None if it is no JSON string, or half of a surrogate pair, which nobody can be sent."""
    if not text.startswith('"'):
        return None
    try:
        value: str = json.loads(text)
        value.encode()
    except ValueError:
        return None
    return value


def _unpacked(arguments: str) -> str:
    """'"{\\\\"a\\\\": 1}"' -> '{"a": 1}'"""
    if arguments == "null":
        return "{}"
    text = _string(arguments)
    return arguments if text is None else text
