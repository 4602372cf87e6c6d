"""Tools as they are asked for: what grammar they make, what is refused, and what the model is shown."""

import json
from typing import Any

import pytest

from kvasir.router.openai.reading import ModelHabits
from tests.unit.router.openai.calling import CITY, HABITS, TOOLS, prompt_of, tool_router
from tests.unit.router.openai.conftest import saying


async def test_calls_that_are_wanted_are_a_matter_of_grammar() -> None:
    async with tool_router(saying("[]")) as router:  # and need no format of the model's own
        for tool_choice in (
            "required",
            {"type": "function", "function": {"name": "weather"}},
            {"type": "function", "function": {"name": "time"}},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "time"}}],
                },
            },
        ):
            response = await router.chat(tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False)
            assert response.status_code == 200, response.text
        sources = []
        for request in router.dispatcher.requests:
            assert request.sampling.grammar is not None
            assert request.sampling.grammar.kind == "json_schema"
            sources.append(json.loads(request.sampling.grammar.source))
        every, weather, time, allowed = sources
        assert every["maxItems"] == every["minItems"] == 1
        one, other = every["items"]["anyOf"]
        assert one["properties"]["name"] == {"const": "weather"}
        path = "#/items/anyOf/0/properties/parameters/$defs/city"  # what it refers to has moved with it
        assert one["properties"]["parameters"]["properties"] == {"city": {"$ref": path}}
        assert other["properties"]["name"] == {"const": "time"}
        assert weather["required"] == ["city"]
        assert time["additionalProperties"] is False
        assert [entry["properties"]["name"] for entry in allowed["items"]["anyOf"]] == [{"const": "time"}]
        assert "time" in prompt_of(router).partition("<tools>")[2]
        assert "weather" not in prompt_of(router)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS}, "tool_choice"),  # a model whose calls nobody can read
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
    ],
    ids=range(10),
)
async def test_what_cannot_be_had(body: dict[str, Any], param: str) -> None:
    async with tool_router(saying("x")) as router:
        response = await router.chat(**body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith(param)
        assert router.dispatcher.requests == []


async def test_a_tools_schema_may_have_a_name_and_is_blamed_by_its_own_place() -> None:
    """Where each tool is a part of one schema: what it refers to is found, what is wrong is told where it stands."""
    good = {
        "$id": "https://example.com/weather",
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "enum": {"$ref": "https://example.com/weather#/$defs/city"},
            "$id": {"type": "string", "format": "path"},
        },
        "$defs": {"city": {"type": "string"}},
    }
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for habits in (ModelHabits(), HABITS):
        async with tool_router(saying("[]"), habits=habits) as router:
            for choice in ("required", {"type": "function", "function": {"name": "b"}}):
                tools = [{"type": "function", "function": {"name": name, "parameters": good}} for name in "ab"]
                response = await router.chat(tools=tools, tool_choice=choice)
                assert response.status_code == 200, response.text
                tools[1]["function"] = {"name": "b", "parameters": bad}
                error = (await router.chat(tools=tools, tool_choice=choice)).json()["error"]
                assert error["param"] == "tools[1].function.parameters"
                assert "uniqueItems" in error["message"]
                assert "(at #/properties/a)" in error["message"]


@pytest.mark.parametrize("kind", ["string", ["object", "null"], 7, None])
async def test_arguments_are_an_object(kind: Any) -> None:
    """As OpenAI has it. A call with a text for arguments was once handed on without its quotes: no JSON."""
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    async with tool_router(saying("[]")) as router:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            response = await router.chat(tools=tools, tool_choice=choice)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "tools[1].function.parameters"
        assert router.dispatcher.requests == []


async def test_other_output_than_a_wanted_call_cannot_be_asked_for() -> None:
    async with tool_router(saying("[]")) as router:
        for choice in ("required", {"type": "function", "function": {"name": "time"}}):
            body: Any = {"tools": TOOLS, "tool_choice": choice}
            response = await router.chat(**body, structured_outputs={"choice": ["a", "b"]})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "structured_outputs"
            # OpenAI has the format hold for answers that are no calls, and there are none here.
            response = await router.chat(**body, response_format={"type": "json_object"})
            assert response.status_code == 200, response.text


async def test_a_schema_without_end_is_a_400() -> None:
    async with tool_router(saying("x"), habits=HABITS) as router:
        for tool_choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": tool_choice,
            }
            deep = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
            text = json.dumps(body).replace('{"name": "f"}}]', f'{{"name": "f", "parameters": {deep}}}}}]')
            response = await router.http.post("/v1/chat/completions", content=text)
            assert response.status_code == 400, response.text


async def test_thoughts_are_free_where_a_call_is_wanted() -> None:
    async with tool_router(saying(CITY), habits=HABITS) as router:
        await router.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
        grammar = router.dispatcher.requests[0].sampling.grammar
        assert grammar is not None
        assert grammar.kind == "lark"
        assert "%json" in grammar.source
        assert "</think>" in grammar.source


@pytest.mark.parametrize("content", ["", None, "absent"])
async def test_a_conversation_with_calls_is_shown_to_the_model(content: str | None) -> None:
    """Arguments are a mapping to a template that wants one, and JSON to one that prints them."""
    shown = []
    async with tool_router(saying("x"), habits=HABITS) as router:
        for arguments in ('{"city":"Z\\u00fcrich"}', "{}", "", "not json", "[1]"):
            call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            assistant = {"role": "assistant", "content": content, "tool_calls": [call, {**call, "id": "call_2"}]}
            if content == "absent":
                del assistant["content"]
            messages = [
                {"role": "user", "content": "hi"},
                assistant,
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
                {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
            ]
            response = await router.post("/v1/chat/completions", messages=messages)
            assert response.status_code == 200, response.text
            shown.append(prompt_of(router))
    assert '<assistant><call>weather{"city": "Zürich"}<call>weather{"city": "Zürich"}<|end|>' in shown[0]
    assert "<call>weather{}<call>" in shown[1]
    assert "<call>weather{}<call>" in shown[2]
    assert "<call>weathernot json<call>" in shown[3]
    assert "<call>weather[1]<call>" in shown[4]
    assert all("<tool>sun<|end|><tool>rain<|end|>" in text for text in shown)
