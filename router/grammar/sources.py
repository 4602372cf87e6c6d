"""Sources of grammars, from what a client asks for."""

import re
from collections.abc import Sequence
from typing import Any

import orjson

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.schemas import as_the_compiler_reads_it

# At each place where JSON allows white space: enough for any indentation, but not without end, for small models are
# fond of line breaks.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def json_schema_grammar(schema: Any, *, whitespace_pattern: str | None = _WHITESPACE) -> Grammar:
    """JSON text that the schema allows, its properties in the schema's order. None: without white space. A `format`
    that the compiler does not know is left out.

    Raises InvalidRequest for what is no schema at all; whether it means something is the checker's question.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest("a schema must be a JSON object")
    options = (
        {"whitespace_flexible": False} if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    )
    try:
        source = orjson.dumps(schema | {"x-guidance": options})
        if b'"format"' in source or b".0" in source:
            source = orjson.dumps(as_the_compiler_reads_it(schema) | {"x-guidance": options})
    except (TypeError, RecursionError) as error:  # deeper than the encoder goes
        raise InvalidRequest(f"the schema is nested too deeply: {error}") from None
    return Grammar("json_schema", source.decode())


def json_object_grammar() -> Grammar:
    return json_schema_grammar({"type": "object"})


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """The output is exactly one of the choices."""
    return Grammar("regex", "|".join(f"(?:{re.escape(choice)})" for choice in choices))
