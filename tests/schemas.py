"""JSON schemas of growing difficulty, the same ones every time, and what must hold of an answer to one.

The first are single values; then come objects, arrays and choices, nested ever deeper, and from the middle on
definitions that refer to each other and to themselves. Everything is bounded, so that answers end.
"""

import ipaddress
import json
import random
import re
from collections.abc import Callable
from datetime import date, datetime, time
from functools import partial
from typing import Any
from uuid import UUID

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

_KEYS = [
    *("name", "age", "id", "tags", "address", "x-y", "a.b", "type", "$ref_", "0", "items"),
    *("ключ", "日本語", "ñandú", "🎉 party", 'quote "it"', "back\\slash", "a/b~c", "tab\there", " ", ""),
]
_VALUES: list[Any] = [
    *("red", "green", "dark blue", "日本", 'say "hi"', "a\\b", "line\nbreak", "🎉", "", "é"),
    *(0, -1, 42, 1.5, True, False, None),
]
_PATTERNS = [
    *(r"^[a-z]{2,6}$", r"^[A-Z][a-z]{0,8} [A-Z][a-z]{1,8}$", r"^[0-9]{3}-[0-9]{4}$", r"^(yes|no|maybe)$"),
    *(r"^#[0-9a-f]{6}$", r"^v[0-9]+\.[0-9]{1,2}$", r"^[^@ ]{1,8}@[a-z]{1,8}\.(com|org)$", r"^[日本語]{1,3}$"),
    *(r"^(ab|cd)*e?$", r"^\S{1,9}$"),
]
_FORMATS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": lambda text: time.fromisoformat(_without_leap_second(text)),
    "date-time": lambda text: datetime.fromisoformat(_without_leap_second(text)),
    "duration": lambda text: _matches(r"P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)", text),
    "uuid": UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "email": lambda text: _matches(r'("[^"]*"|[^@\s"]+)@\S+', text),
    "hostname": lambda text: _matches(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", text),
}


def _without_leap_second(text: str) -> str:
    """Python knows fewer digits of a second, and no 61st one."""
    text = re.sub(r"(:\d\d)[.,](\d{1,6})\d*", r"\1.\2", text.upper())
    return text.replace(":60", ":59")


def _matches(pattern: str, text: str) -> None:
    if not re.fullmatch(pattern, text):
        raise ValueError(text)


def schemas(count: int = 200) -> list[Schema]:
    return [_Maker(index, difficulty=index / count).schema() for index in range(count)]


def check_answer(schema: Schema, text: str) -> None:
    """Raises ValidationError or ValueError where the text is no JSON that the schema allows."""
    formats = FormatChecker(formats=())
    for name, parse in _FORMATS.items():
        formats.checks(name, raises=ValueError)(partial(_is_read, parse))
    Draft202012Validator(schema, format_checker=formats).validate(json.loads(text))


def _is_read(parse: Callable[[str], object], value: object) -> bool:
    """A format says nothing of what is no string."""
    if isinstance(value, str):
        parse(value)
    return True


class _Maker:
    def __init__(self, index: int, difficulty: float) -> None:
        self._rng = random.Random(f"schema {index}")
        self._difficulty = difficulty
        self._definitions: dict[str, Schema] = {}

    def schema(self) -> Schema:
        depth = int(self._difficulty * 4)
        root = self._value(depth) if self._difficulty < 0.1 else self._object(max(depth, 1))
        return {**root, "$defs": self._definitions} if self._definitions else root

    def _value(self, depth: int) -> Schema:
        makers: list[Callable[[int], Schema]] = [self._leaf]
        if depth > 0:
            makers += [self._object, self._object, self._array, self._any_of]
        if depth > 0 and self._difficulty > 0.4:
            makers += [self._all_of, self._reference, self._map]
        if depth > 1 and self._difficulty > 0.6:
            makers += [self._linked_list, self._tagged_union]
        return self._rng.choice(makers)(depth - 1)

    # --- values without parts ---

    def _leaf(self, _: int) -> Schema:
        makers = [self._string, self._integer, self._number, self._enum, self._pattern, self._format, self._plain]
        return self._rng.choice(makers)()

    def _plain(self) -> Schema:
        return self._rng.choice(
            [{"type": "boolean"}, {"type": "null"}, {"const": self._rng.choice(_VALUES)}, {"type": ["null", "boolean"]}]
        )

    def _string(self) -> Schema:
        shortest = self._rng.randint(0, 4)
        lengths = {"minLength": shortest, "maxLength": shortest + self._rng.randint(0, 8)}
        return {"type": self._rng.choice(["string", "string", ["string", "null"]]), **lengths}

    def _integer(self) -> Schema:
        low = self._rng.randint(-2000, 2000)
        bounds = [
            {"minimum": low, "maximum": low + self._rng.randint(0, 500)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + self._rng.randint(2, 50)},
            {"minimum": 0, "maximum": 100, "multipleOf": self._rng.choice([2, 5, 7])},
        ]
        return {"type": "integer", **self._rng.choice(bounds)}

    def _number(self) -> Schema:
        low = round(self._rng.uniform(-50, 50), 2)
        bounds: list[Schema] = [
            {"minimum": low, "maximum": low + 10},
            {"exclusiveMinimum": 0, "maximum": 1},
            {"minimum": low},
        ]
        return {"type": "number", **self._rng.choice(bounds)}

    def _enum(self) -> Schema:
        return {"enum": self._rng.sample(_VALUES, self._rng.randint(1, 6))}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._rng.choice(_PATTERNS)}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._rng.choice(sorted(_FORMATS))}

    # --- values with parts ---

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_KEYS, self._rng.randint(1, 3 + int(3 * self._difficulty)))
        schema: Schema = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        if self._rng.random() < 0.8:
            schema["required"] = self._rng.sample(names, self._rng.randint(1, len(names)))
        if self._rng.random() < 0.7:
            schema["additionalProperties"] = self._rng.choice([False, False, {"type": "integer", "maximum": 9}])
        return schema

    def _array(self, depth: int) -> Schema:
        if self._rng.random() < 0.3:
            parts = [self._value(depth) for _ in range(self._rng.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        shortest = self._rng.randint(0, 2)
        longest = shortest + self._rng.randint(0, 2)
        return {"type": "array", "items": self._value(depth), "minItems": shortest, "maxItems": longest}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth) for _ in range(self._rng.randint(2, 3))]}

    def _all_of(self, depth: int) -> Schema:
        first, second = self._rng.sample(_KEYS, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {first: self._value(depth)}, "required": [first]},
                {"type": "object", "properties": {second: self._leaf(0)}, "required": [second]},
            ]
        }

    def _map(self, depth: int) -> Schema:
        return {
            "type": "object",
            "patternProperties": {"^[a-z]{1,4}$": self._value(depth)},
            "additionalProperties": False,
            "minProperties": 1,
        }

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._value(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _linked_list(self, depth: int) -> Schema:
        self._definitions["node"] = {
            "type": "object",
            "properties": {"value": self._leaf(depth), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node"}

    def _tagged_union(self, depth: int) -> Schema:
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self._value(depth)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in ("circle", "square")
            ]
        }
