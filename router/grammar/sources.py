"""Sources of grammars, from what a client asks for."""

import json
import re
from collections.abc import Sequence
from typing import Any

from kvasir.router.types import Grammar


def json_schema_grammar(schema: Any) -> Grammar:
    """JSON text that the schema allows. Properties come in the schema's order."""
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def json_object_grammar() -> Grammar:
    return json_schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> Grammar:
    """The whole output matches the pattern."""
    return Grammar("regex", pattern)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """The output is exactly one of the choices."""
    return Grammar("regex", "|".join(f"(?:{re.escape(choice)})" for choice in choices))


def lark_grammar(source: str) -> Grammar:
    """A context-free grammar in the Lark notation; the output is a `start`."""
    return Grammar("lark", source)
