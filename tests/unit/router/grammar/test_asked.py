"""From the fields of a body to a grammar, or to an error that names the field."""

import json
import re
from typing import Any

import pytest

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.asked import asked_grammar
from kvasir.router.grammar.sources import choice_grammar, json_schema_grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}


def schema_of(grammar: Grammar) -> Any:
    assert grammar.kind == "json_schema"
    schema = json.loads(grammar.source)
    del schema["x-guidance"]
    return schema


def of_format(value: Any) -> Grammar:
    asked = asked_grammar(value, None)
    assert asked is not None
    return asked.grammar


def of_outputs(value: Any) -> Grammar:
    asked = asked_grammar(None, value)
    assert asked is not None
    return asked.grammar


def test_nothing_is_asked_for() -> None:
    assert asked_grammar(None, None) is None
    assert asked_grammar({"type": "text"}, None) is None


def test_openai() -> None:
    assert schema_of(of_format({"type": "json_object"})) == {"type": "object"}
    by_schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    assert schema_of(of_format(by_schema)) == SCHEMA
    # Order is part of what is asked for.
    assert list(json.loads(of_format(by_schema).source)["properties"]) == ["b", "a"]


def test_vllm() -> None:
    assert schema_of(of_outputs({"json": SCHEMA})) == SCHEMA
    assert schema_of(of_outputs({"json": json.dumps(SCHEMA)})) == SCHEMA
    assert schema_of(of_outputs({"json_object": True, "regex": None})) == {"type": "object"}
    assert of_outputs({"regex": "[ab]+"}) == Grammar("regex", "[ab]+")
    assert of_outputs({"grammar": 'start: "x"'}) == Grammar("lark", 'start: "x"')
    assert of_outputs({"choice": ["a", "b"]}) == choice_grammar(["a", "b"])
    assert asked_grammar({"type": "text"}, {"regex": "a"}) is not None


def test_choices_are_taken_literally() -> None:
    choices = ["a.c", "(", "b|d", "", "日本 ", "\n"]
    pattern = choice_grammar(choices).source
    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not any(re.fullmatch(pattern, other) for other in ("abc", "b", "日本", "a.c("))


def test_options_of_json() -> None:
    compact = of_outputs({"json": SCHEMA, "disable_any_whitespace": True})
    assert json.loads(compact.source)["x-guidance"] == {"whitespace_flexible": False}
    own = of_outputs({"json": SCHEMA, "whitespace_pattern": " ?"})
    assert json.loads(own.source)["x-guidance"] == {"whitespace_pattern": " ?"}
    nested = {"properties": {"o": SCHEMA, "p": {"additionalProperties": True, "properties": {}}}}
    closed = schema_of(of_outputs({"json": nested, "disable_additional_properties": True}))
    assert closed["additionalProperties"] is False
    assert closed["properties"]["o"]["additionalProperties"] is False
    assert closed["properties"]["p"]["additionalProperties"] is True


def test_what_a_client_writes_into_the_options_of_the_compiler_is_not_heard() -> None:
    lenient = json_schema_grammar(SCHEMA | {"x-guidance": {"lenient": True, "coerce_one_of": True}})
    assert lenient == json_schema_grammar(SCHEMA)


DEEP: Any = {}
for _ in range(900):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ("json", "response_format"),
        ([], "response_format"),
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": 7}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": 7, "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "y"}},
            "response_format.json_schema.strict",
        ),
    ],
)
def test_response_format_is_refused_by_the_name_of_what_is_wrong(response_format: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        asked_grammar(response_format, None)
    assert raised.value.param == param
    assert param in str(raised.value)


@pytest.mark.parametrize(
    ("structured_outputs", "param"),
    [
        ("json", "structured_outputs"),
        ({}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"structural_tag": {}}, "structured_outputs"),
        ({"xml": "a"}, "structured_outputs"),
        ({"json": 5}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[1]"}, "structured_outputs.json"),
        ({"json": DEEP, "disable_additional_properties": True}, "structured_outputs.json"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"grammar": ["a"]}, "structured_outputs.grammar"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice"),
        ({"json": {}, "whitespace_pattern": 5}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_structured_outputs_are_refused_by_the_name_of_what_is_wrong(structured_outputs: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        asked_grammar(None, structured_outputs)
    assert raised.value.param == param


def test_both_at_once() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        asked_grammar({"type": "json_object"}, {"regex": "a"})
