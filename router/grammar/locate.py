"""Which part of a schema is at fault: the compiler says what is wrong, and not always where."""

import json
import time
from collections.abc import Iterator
from typing import Any

from llguidance import LLTokenizer

from kvasir.common.grammar import Grammar
from kvasir.common.grammar_compiler import GrammarError, compile_grammar

_MAX_SEARCH_S = 0.2
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not")


def where_it_fails(tokenizer: LLTokenizer, grammar: Grammar, message: str) -> str | None:
    """The innermost part that fails alone with the same message, as a JSON pointer: "#/properties/a". None: unknown."""
    if grammar.kind != "json_schema":
        return None
    give_up_s = time.monotonic() + _MAX_SEARCH_S
    schema: Any = json.loads(grammar.source)
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    pointer = "#"

    def fails(part: Any) -> bool:
        whole = part | definitions if isinstance(part, dict) and part is not definitions else part
        try:
            compile_grammar(tokenizer, Grammar("json_schema", json.dumps(whole)))
        except GrammarError as error:
            return str(error) == message
        return False

    while time.monotonic() < give_up_s:
        inner = next(((name, part) for name, part in _parts(schema) if fails(part)), None)
        if inner is None:
            break
        pointer, schema = pointer + inner[0], inner[1]
    return pointer if pointer != "#" else None


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """Schemas directly within this one: {"properties": {"a": A}, "items": B} -> ("/properties/a", A), ("/items", B)"""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            yield from ((f"/{key}/{_escaped(name)}", part) for name, part in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"/{key}/{index}", part) for index, part in enumerate(value))
        elif key in _SINGLE:
            yield f"/{key}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
