"""Bytes to a request body, or an InvalidRequest that names the field at fault."""

import re
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import missing
from kvasir.router.openai.models import Body

B = TypeVar("B", bound=Body)
_MAX_CONTAINERS = 200_000
# Of pydantic's types of errors; what it says itself names Python's types, and our classes.
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    **dict.fromkeys(["dict_type", "model_type", "model_attributes_type"], "an object"),
}
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

# They change nothing here, as at OpenAI's own servers for most models.
ACCEPTED = frozenset(
    {"parallel_tool_calls", "reasoning_effort", "verbosity", "prediction", "spaces_between_special_tokens"}
    | {"prompt_cache_options", "prompt_cache_retention"}
)

# What would change the answer but cannot be had here, and which values of it ask for nothing.
_ONLY_IF_EMPTY = (
    *("tools", "functions", "suffix", "use_beam_search", "documents", "audio", "prompt_embeds"),
    *("moderation", "context_management", "repetition_detection"),
    *("watermarking", "logprob_token_ids", "return_tokens_as_token_ids", "return_token_offsets"),
    *("truncate_prompt_tokens", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("logits_processors", "chat_template"),  # a template is a program: the operator's alone
)
UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_ONLY_IF_EMPTY, lambda value: not value),
    **dict.fromkeys(["tool_choice", "function_call"], lambda value: value in ("none", "auto")),
    **dict.fromkeys(["best_of", "length_penalty"], lambda value: value == 1),
    **dict.fromkeys(["web_search_options", "thinking_token_budget"], lambda value: False),  # {} searches; 0: no thought
    "modalities": lambda value: value == ["text"],
}


def parse(fields: dict[str, Any], kind: type[B]) -> tuple[B, int]:
    """The body, and how many fields of it nobody knows."""
    known = kind.model_fields
    num_unknown = 0
    for name, value in fields.items():
        if name in known or name in ACCEPTED:
            continue
        asks_for_nothing = UNSUPPORTED.get(name)
        if asks_for_nothing is None:
            num_unknown += 1
        elif value is not None and not asks_for_nothing(value):
            instead = f"; use 'structured_outputs.{name[7:]}'" if name.startswith("guided_") else " yet"
            raise InvalidRequest(f"'{name}' is not supported{instead}", name, "unsupported_parameter")
    return validated(fields, kind), num_unknown


def validated(fields: dict[str, Any], kind: type[B]) -> B:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise first_problem(error) from None


def json_object(data: bytes) -> dict[str, Any]:
    """Raises InvalidRequest also for what would take long to read: millions of small lists are no request."""
    if _num_containers(data) > _MAX_CONTAINERS:
        raise InvalidRequest(f"the body has more than {_MAX_CONTAINERS} lists and objects", code="invalid_json")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        what = f"JSON: {error}" if _is_utf8(data) else "UTF-8"
        raise InvalidRequest(f"the request body is not valid {what}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object", code="invalid_json")
    return value


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _num_containers(data: bytes) -> int:
    """At most so many lists and objects; brackets within strings are looked at only where it matters."""
    num_brackets = data.count(b"[") + data.count(b"{")
    if num_brackets > _MAX_CONTAINERS:
        for text in _STRING.finditer(data):
            num_brackets -= data.count(b"[", *text.span()) + data.count(b"{", *text.span())
    return num_brackets


def first_problem(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_context=False)[0]
    param = path_of(problem["loc"])
    if problem["type"] == "missing":
        return missing(param)
    wanted = _WANTED.get(problem["type"])
    said = f"it must be {wanted}" if wanted else problem["msg"].replace(" after validation", "")
    message = f"invalid '{param}': {said}, got {_shown.repr(problem['input'])}"
    return InvalidRequest(message, param, "invalid_type" if problem["type"].endswith("_type") else "invalid_value")


def path_of(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') -> 'messages[0].role'"""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


class _Shown(reprlib.Repr):
    """Neither long nor deep, whatever it is; and what JSON has other words for is in these."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"


_shown = _Shown()
