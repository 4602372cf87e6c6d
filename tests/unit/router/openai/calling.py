"""A model that calls tools, and its answers, streamed and whole."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import httpx

from kvasir.router.openai.reading import ModelHabits
from kvasir.router.types import RoutedRequest
from tests.fake_dispatcher import Step
from tests.unit.router.openai.conftest import LIMITS, TOKENIZER, Router, running_router

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
