"""Calls of tools over HTTP: streamed or whole they are the same, wherever the answer is cut."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvasir.router.openai.reading import ModelHabits
from kvasir.router.types import RoutedRequest
from tests.fake_dispatcher import Step
from tests.unit.router.openai.conftest import LIMITS, TOKENIZER, Router, ids, running_router, saying

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "$defs": {"city": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
CITY = '{"city": "Zürich \\"}\\"\\n</tool_call> {", "n": [1]}'
HERMES = (
    "Let me look.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
CALLS = [("weather", CITY), ("time", "{}")]
HABITS = ModelHabits(tool_format="hermes", reasoning_format="qwen3")


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Every event is JSON, and the last one [DONE]."""
    assert response.status_code == 200, response.text
    *lines, done = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(response: httpx.Response) -> tuple[dict[str, Any], str]:
    """The message and the finish reason, put together as clients do it."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reasons = []
    for chunk in chunks_of(response):
        [choice] = chunk["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for piece in delta.get("tool_calls", []):
            if piece["index"] == len(message["tool_calls"]):
                function = {"name": piece["function"]["name"], "arguments": ""}
                message["tool_calls"].append({"id": piece["id"], "type": piece["type"], "function": function})
            else:
                assert piece["index"] == len(message["tool_calls"]) - 1
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
            message["tool_calls"][-1]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    [reason] = reasons
    return message, reason


def tool_router(
    script: Callable[[RoutedRequest], Sequence[Step]],
    habits: ModelHabits = ModelHabits(),  # noqa: B008, it is frozen
) -> AbstractAsyncContextManager[Router]:
    """Its model takes prompts that are long enough for tools."""
    limits = replace(LIMITS, max_model_len=8000, max_prompt_tokens=7000)
    return running_router(script, habits=habits, limits=limits)


def prompt_of(router: Router) -> str:
    """The last one."""
    return TOKENIZER.decode([*router.dispatcher.requests[-1].prompt_token_ids])


async def both(router: Router, **body: Any) -> tuple[str, list[tuple[str, str]], str, str]:
    """Content, calls, finish reason and reasoning; the streamed ones have been seen to be the same."""
    answer = (await router.chat(**body)).json()
    assert "choices" in answer, answer
    [choice] = answer["choices"]
    message = choice["message"]
    other, reason = streamed(await router.chat(stream=True, **body))
    calls, other_calls = (
        [(call["function"]["name"], call["function"]["arguments"]) for call in each.get("tool_calls", [])]
        for each in (message, other)
    )
    assert calls == other_calls
    assert reason == choice["finish_reason"]
    assert other["content"] == (message["content"] or "")
    assert other["reasoning"] == message.get("reasoning", "") == message.get("reasoning_content", "")
    assert len({call["id"] for call in message.get("tool_calls", [])}) == len(calls)
    return other["content"], calls, reason, other["reasoning"]


@pytest.mark.parametrize("tokens_a_step", [1, 50, 1000])
async def test_two_calls(tokens_a_step: int) -> None:
    async with tool_router(saying(HERMES, tokens_a_step=tokens_a_step), habits=HABITS) as router:
        assert await both(router, tools=TOOLS) == ("Let me look.", CALLS, "tool_calls", "")
        assert await both(router, tools=TOOLS, parallel_tool_calls=False) == (
            "Let me look.",
            CALLS[:1],
            "tool_calls",
            "",
        )
        assert router.dispatcher.num_running == 0
        # Nobody looks for calls where there can be none.
        assert (await both(router))[:3] == (HERMES, [], "stop")
        assert (await both(router, tools=TOOLS, tool_choice="none"))[:3] == (HERMES, [], "stop")


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    async with tool_router(saying(HERMES.partition("\n")[2]), habits=HABITS) as router:
        message = (await router.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
        assert [call["type"] for call in message["tool_calls"]] == ["function"] * 2
        assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"])


ASKED: list[tuple[Any, str]] = [
    ("auto", HERMES),
    ("required", f'[{{"name": "weather", "parameters": {CITY}}}, {{"name": "time", "parameters": {{}}}}]'),
    ({"type": "function", "function": {"name": "weather"}}, CITY),
]


@pytest.mark.parametrize(("tool_choice", "text"), ASKED, ids=["auto", "required", "named"])
async def test_an_answer_may_be_cut_anywhere(tool_choice: Any, text: str) -> None:
    expected = [("weather", CITY)] if isinstance(tool_choice, dict) else CALLS
    async with tool_router(saying(text), habits=HABITS) as router:
        for max_tokens in [*range(1, 41), *range(41, len(ids(text)), 7)]:
            content, calls, reason, _ = await both(router, tools=TOOLS, tool_choice=tool_choice, max_tokens=max_tokens)
            assert "Let me look.".startswith(content.rstrip())
            for (name, arguments), (wanted_name, wanted_arguments) in zip(calls, expected, strict=False):
                assert name == wanted_name
                assert wanted_arguments.startswith(arguments.rstrip("\ufffd"))
            if reason == "tool_calls":
                assert calls == expected
            else:
                assert reason == "length"
        assert (await both(router, tools=TOOLS, tool_choice=tool_choice))[1:3] == (expected, "tool_calls")


async def test_a_call_that_never_ends_is_not_reported_as_one() -> None:
    async with tool_router(saying('<tool_call>{"name": "weather", "arguments": {"city": "'), habits=HABITS) as router:
        content, calls, reason, _ = await both(router, tools=TOOLS)
        assert (content, calls, reason) == ("", [("weather", '{"city": "')], "stop")


async def test_without_a_call_nothing_ends_for_calls() -> None:
    """A call was wanted and none came: once that was an empty list of calls with their finish reason."""
    async with tool_router(saying("[]"), habits=HABITS) as router:
        assert (await both(router, tools=TOOLS, tool_choice="required"))[1:3] == ([], "stop")
        message = (await router.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]["message"]
        assert "tool_calls" not in message


async def test_each_choice_makes_calls_of_its_own() -> None:
    async with tool_router(saying(HERMES), habits=HABITS) as router:
        whole = (await router.chat(tools=TOOLS, n=2)).json()["choices"]
        assert [choice["finish_reason"] for choice in whole] == ["tool_calls"] * 2
        ids_of_calls = [call["id"] for choice in whole for call in choice["message"]["tool_calls"]]
        assert len(set(ids_of_calls)) == 4
        chunks = chunks_of(await router.chat(tools=TOOLS, n=2, parallel_tool_calls=False, stream=True))
        for index in range(2):
            choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]
            assert "".join(piece["function"]["arguments"] for piece in pieces) == CITY
            assert choices[-1]["finish_reason"] == "tool_calls"


async def test_a_stop_string_within_a_call_leaves_no_markup() -> None:
    async with tool_router(saying(HERMES), habits=HABITS) as router:
        assert (await both(router, tools=TOOLS, stop=['"name"']))[:3] == ("Let me look.", [], "stop")
        assert (await both(router, tools=TOOLS, stop=["ich"]))[:3] == (
            "Let me look.",
            [("weather", '{"city": "Zür')],
            "stop",
        )


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


THINKING = "<think>\nWell, {1}\n</think>\n\n"


@pytest.mark.parametrize("tokens_a_step", [1, 50])
async def test_thoughts_calls_and_their_tokens(tokens_a_step: int) -> None:
    async with tool_router(saying(THINKING + HERMES, tokens_a_step=tokens_a_step), habits=HABITS) as router:
        assert await both(router, tools=TOOLS) == ("Let me look.", CALLS, "tool_calls", "Well, {1}")
        answer = (await router.chat(tools=TOOLS)).json()
        num_thought = len(ids("<think>\nWell, {1}\n</think>"))
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
        hidden = (await router.chat(tools=TOOLS, include_reasoning=False)).json()["choices"][0]["message"]
        assert "reasoning" not in hidden
        assert hidden["content"] == "Let me look."
    async with tool_router(saying(THINKING + "Hello.", tokens_a_step=tokens_a_step), habits=HABITS) as router:
        assert await both(router) == ("Hello.", [], "stop", "Well, {1}")
        content, _, reason, thought = await both(router, max_tokens=12)
        assert (content, reason) == ("", "length")
        assert "Well, {1}".startswith(thought)
        message = (await router.chat(max_tokens=12)).json()["choices"][0]["message"]
        assert message["content"] is None


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
