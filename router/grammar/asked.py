"""What of a request asks for a grammar: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.sources import choice_grammar, json_object_grammar, json_schema_grammar
from kvasir.router.openai.errors import missing, wrong_type

_MAX_CHOICES = 10_000
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    grammar: Grammar
    param: str  # the field that asked for it, as the client wrote it


def asked_grammar(response_format: Any, structured_outputs: Any) -> AskedGrammar | None:
    """None: the output may be any text. Raises InvalidRequest, naming the field at fault."""
    by_format = _of_response_format(response_format)
    by_outputs = _of_structured_outputs(structured_outputs)
    if by_format and by_outputs:
        message = "'response_format' and 'structured_outputs' exclude each other"
        raise InvalidRequest(message, "structured_outputs", "invalid_value")
    return by_format or by_outputs


def _of_response_format(value: Any) -> AskedGrammar | None:
    param = "response_format"
    if value is None:
        return None
    kind = _object(value, param).get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return AskedGrammar(json_object_grammar(), param)
        case "json_schema":
            return _of_json_schema(value.get("json_schema"), f"{param}.json_schema")
        case None:
            raise missing(f"{param}.type")
    message = f"'{param}.type' must be text, json_object or json_schema, got {kind!r:.60}"
    raise InvalidRequest(message, f"{param}.type", "invalid_value")


def _of_json_schema(value: Any, param: str) -> AskedGrammar:
    """{"name": "person", "schema": {..}, "strict": true}. Whether strict or not, the schema is kept to."""
    if value is None:
        raise missing(param)
    fields = _object(value, param)
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        if fields.get(name) is not None and not isinstance(fields[name], kind):
            raise wrong_type(f"{param}.{name}", "a string" if kind is str else "true or false")
    for name in ("name", "schema"):
        if fields.get(name) is None:
            raise missing(f"{param}.{name}")
    return _named(f"{param}.schema", lambda: json_schema_grammar(fields["schema"]))


def _of_structured_outputs(value: Any) -> AskedGrammar | None:
    param = "structured_outputs"
    if value is None:
        return None
    given = {key: entry for key, entry in _object(value, param).items() if entry is not None and entry is not False}
    unknown = sorted(given.keys() - {*_KINDS, *_OPTIONS})
    if unknown:
        raise InvalidRequest(f"'{param}.{unknown[0]:.60}' is not supported", param, "unsupported_parameter")
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1:
        message = f"'{param}' must hold exactly one of {', '.join(_KINDS)}, got {' and '.join(kinds) or 'none'}"
        raise InvalidRequest(message, param, "invalid_value")
    [kind] = kinds
    return _named(f"{param}.{kind}", lambda: _structured(kind, given, f"{param}.{kind}"))


def _structured(kind: str, given: dict[str, Any], param: str) -> Grammar:
    value = given[kind]
    match kind:
        case "json":
            return _json(value, given, param)
        case "json_object":
            if value is not True:
                raise wrong_type(param, "true or false")
            return _json({"type": "object"}, given, param)
        case "choice":
            is_list = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
            if not is_list or not 0 < len(value) <= _MAX_CHOICES:
                raise wrong_type(param, f"a list of 1 to {_MAX_CHOICES} strings")
            return choice_grammar(value)
    if not isinstance(value, str):
        raise wrong_type(param, "a string")
    return Grammar("regex" if kind == "regex" else "lark", value)


def _json(schema: Any, given: dict[str, Any], param: str) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"'{param}' is not valid JSON: {error}", param, "invalid_json") from None
    pattern = given.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise wrong_type("structured_outputs.whitespace_pattern", "a string")
    if given.get("disable_additional_properties"):
        json_schema_grammar(schema)  # neither too deep nor something else
        schema = _closed(schema)
    if given.get("disable_any_whitespace"):
        return json_schema_grammar(schema, whitespace_pattern=None)
    return json_schema_grammar(schema) if pattern is None else json_schema_grammar(schema, whitespace_pattern=pattern)


def _closed(schema: Any) -> Any:
    """Objects with named properties take no others, unless they say so themselves."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(entry) for key, entry in schema.items()}
    if isinstance(schema.get("properties"), dict) and "patternProperties" not in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _named(param: str, make: Callable[[], Grammar]) -> AskedGrammar:
    try:
        return AskedGrammar(make(), param)
    except InvalidRequest as error:
        if error.param is not None:
            raise
        raise InvalidRequest(f"invalid '{param}': {error}", param, "invalid_value") from None


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(param, "an object")
    return value
