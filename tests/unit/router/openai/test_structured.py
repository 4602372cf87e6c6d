"""What asks for a grammar over HTTP: it reaches the nodes as it should, or is a 400 that says why, at once."""

import asyncio
import json
from typing import Any

import openai
import pytest

from kvasir.common.grammar import Grammar
from kvasir.router.grammar.sources import choice_grammar, json_object_grammar, json_schema_grammar
from tests.unit.router.openai.conftest import Router, running_router, saying

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def sent(router: Router) -> set[Grammar | None]:
    return {request.sampling.grammar for request in router.dispatcher.requests}


async def test_the_grammar_reaches_the_nodes_as_its_source(router: Router) -> None:
    for asked, grammar in (
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, json_object_grammar()),
        ({"response_format": BY_SCHEMA}, json_schema_grammar(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, json_schema_grammar(SCHEMA)),
        ({"structured_outputs": {"regex": "[ab]+"}}, Grammar("regex", "[ab]+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, choice_grammar(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, Grammar("lark", 'start: "x"')),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, Grammar("lark", '%llguidance {}\n\nstart: "x"\n')),
    ):
        for answer in (await router.chat(**asked, n=2), await router.complete(**asked, prompt=["p", "q"])):
            assert answer.status_code == 200, answer.text
        assert sent(router) == {grammar}, asked
        router.dispatcher.requests.clear()


async def test_the_official_client_reads_what_it_asked_for() -> None:
    async with running_router(saying('{"a": "b"}')) as router:
        answer = await router.openai.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            response_format=BY_SCHEMA,  # type: ignore[arg-type]
        )
        assert json.loads(answer.choices[0].message.content or "") == {"a": "b"}
        with pytest.raises(openai.BadRequestError, match="nonsense"):
            await router.openai.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                response_format=schema_format({"type": "nonsense"}),  # type: ignore[arg-type]
            )


DEADLINE_S = 60.0
GRAMMAR_TIMEOUT_S = 5.0  # good ones take milliseconds
TOO_LONG = "5 s"


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


# What an answer's error must name; None: it is served, unless this machine takes too long.
HOSTILE: list[tuple[str, Any, str | None]] = [
    ("pattern", {"properties": {"a": {"type": "string", "pattern": "^(["}}, "required": ["a"]}, "^(["),
    ("unknown $ref", {"$ref": "#/$defs/missing"}, "/$defs/missing"),
    ("unknown type", {"type": "thing"}, "thing"),
    ("no schema", None, "json_schema.schema"),
    ("property set to a string", {"properties": {"foo": "bar"}}, "/properties/foo"),
    ("items a list of numbers", {"type": "array", "items": [1]}, "/items/0"),
    ("type a number", {"type": 7}, "type must be"),
    ("empty anyOf", {"anyOf": []}, "anyOf is empty"),
    ("refers to itself", {"$ref": "#"}, "no text"),
    ("recursive", {"type": "object", "properties": {"a": {"$ref": "#"}}}, None),
    ("nested 50 deep", nested(50), None),
    ("nested 80 deep", nested(80), "recursion limit"),
    ("nested 200 deep", nested(200), "too deeply"),
    ("enum of 5 MB", {"enum": [f"value {i:07}" for i in range(300_000)]}, "may have at most"),
    ("enum of 800 KB", {"enum": [f"value {i:07}" for i in range(45_000)]}, None),
    ("anything", {}, None),
    ("true", True, "schema"),
    ("long repetition", {"type": "string", "pattern": "(a|b){1,100000}"}, None),
    (
        "many optional properties",
        {"properties": {f"p{i:05}": {"pattern": f"^{i}x+$"} for i in range(14_000)}},
        TOO_LONG,
    ),
]


async def test_hostile_schemas_are_answered_in_time_and_disturb_nobody() -> None:
    async with running_router(
        saying("x" * 70, pause_s=0.05), max_request_bytes=8 << 20, grammar_timeout_s=GRAMMAR_TIMEOUT_S
    ) as router:
        await router.chat(max_completion_tokens=5, response_format={"type": "json_object"})  # the workers are there
        streams = [asyncio.create_task(one_stream(router)) for _ in range(3)]
        for name, schema, named in HOSTILE:
            async with asyncio.timeout(DEADLINE_S):
                answer = await router.chat(max_completion_tokens=5, response_format=schema_format(schema))
            if answer.status_code == 200:
                assert named is None, (name, answer.text[:500])
            else:
                error = answer.json()["error"]
                assert answer.status_code == 400, (name, error)
                assert error["type"] == "invalid_request_error"
                assert error["param"].startswith("response_format"), name
                assert (named or TOO_LONG) in error["message"], (name, error["message"])
        assert set(await asyncio.gather(*streams)) == {"x" * 70}
        assert (await router.chat()).status_code == 200


async def one_stream(router: Router) -> str:
    stream = await router.openai.completions.create(model="m", prompt="p", stream=True, max_tokens=150)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_a_bad_pattern_a_bad_choice_and_a_bad_grammar(router: Router) -> None:
    for asked, named in (
        ({"regex": "(["}, "(["),
        ({"regex": "(?=a)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"grammar": 'begin: "x"'}, "start"),
        ({"grammar": "start: <|nope|>"}, "<|nope|>"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ):
        answer = await router.complete(structured_outputs=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_grammar")
        assert error["param"] == f"structured_outputs.{next(iter(asked))}"
        assert named in error["message"], error["message"]
    assert router.dispatcher.requests == []


async def test_a_format_that_nobody_knows_is_a_remark(router: Router) -> None:
    """So JSON Schema has it, and pydantic writes some of its own: "path", "password", "binary"."""
    data = {"properties": {"format": {"type": "string"}}, "default": {"format": "path"}}
    for part in ({"type": "string", "format": "path"}, {"type": "string", "format": "date"}, data):
        schema = {"type": "object", "properties": {"a": part, "b": {"items": {"format": "password"}}}}
        assert (await router.chat(response_format=schema_format(schema))).status_code == 200
        [grammar] = sent(router)
        assert grammar is not None
        kept = {"type": "string"} if part.get("format") == "path" else part
        assert json.loads(grammar.source)["properties"] == {"a": kept, "b": {"items": {}}}
        router.dispatcher.requests.clear()


async def test_a_schema_may_count_in_floats(router: Router) -> None:
    """So does JSON Schema: 3.0 is an integer. What is no count stays as it is."""
    item = {"type": "string", "minLength": 1.0, "maxLength": 3.0}
    ages = {"type": "number", "maximum": 5.0, "default": {"maxLength": 3.0}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": item, "maxItems": 2.0}, "maxItems": ages},
    }
    assert (await router.chat(response_format=schema_format(schema))).status_code == 200
    [grammar] = sent(router)
    assert grammar is not None
    told = json.loads(grammar.source)["properties"]
    assert json.dumps(told["a"]["items"]) == '{"type": "string", "minLength": 1, "maxLength": 3}'
    assert json.dumps(told["a"]["maxItems"]) == "2"
    assert json.dumps(told["maxItems"]) == json.dumps(ages)
    router.dispatcher.requests.clear()
    for count in (1.5, 1e20, 1e300, -1e300):
        item["maxLength"] = count
        refused = await router.chat(response_format=schema_format(schema))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_grammar")
        assert "maxLength" in refused.json()["error"]["message"]


async def test_an_error_of_a_stream_comes_before_it_with_a_status(router: Router) -> None:
    answer = await router.chat(stream=True, response_format=schema_format({"type": "thing"}))
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
