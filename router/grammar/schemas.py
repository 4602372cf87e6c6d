"""JSON schemas, rewritten part by part: what is not a schema in them (data, names of properties) stays as it is."""

from collections.abc import Callable
from typing import Any

from kvasir.router.openai.models import whole

_DATA = frozenset({"const", "enum", "default", "example", "examples", "required"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # names to schemas

# Those that the compiler keeps to. JSON Schema has a validator take the others for remarks.
_KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

# Here the compiler wants an integer as such. In JSON Schema, 3.0 is one too.
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)


def rewritten(schema: Any, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`rewrite` is given each object that is a schema, and not what is within it. Raises RecursionError."""
    if isinstance(schema, list):
        return [rewritten(entry, rewrite) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _member(key, value, rewrite) for key, value in rewrite(schema).items()}


def _member(key: str, value: Any, rewrite: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if key in _DATA:
        return value
    if key in _MAPS and isinstance(value, dict):
        return {name: rewritten(part, rewrite) for name, part in value.items()}
    return rewritten(value, rewrite)


def as_the_compiler_reads_it(schema: dict[str, Any]) -> Any:
    """{"type": "string", "format": "path", "maxLength": 3.0} -> {"type": "string", "maxLength": 3}"""

    def rewrite(part: dict[str, Any]) -> dict[str, Any]:
        return {
            key: whole(value) if key in _COUNTS else value
            for key, value in part.items()
            if key != "format" or not isinstance(value, str) or value in _KNOWN_FORMATS
        }

    return rewritten(schema, rewrite)


def moved(schema: Any, to: str) -> Any:
    """The schema as a part of another one, where `#/...` is now under `to`; a name of its own would shut it off."""
    own_name = schema.get("$id", "") if isinstance(schema, dict) else ""

    def rewrite(part: dict[str, Any]) -> dict[str, Any]:
        part = {key: value for key, value in part.items() if key != "$id" or not isinstance(value, str)}
        target = part.get("$ref")
        if isinstance(target, str):
            target = target.removeprefix(own_name) if isinstance(own_name, str) else target
            if target.startswith("#"):
                part["$ref"] = to + target[1:]
        return part

    return rewritten(schema, rewrite)
