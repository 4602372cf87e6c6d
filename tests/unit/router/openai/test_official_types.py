"""Whole answers and events, held strictly to the types of the official client: nothing is missing, null where it may
not be, or of another type, and what is more than they know is known here."""

import json
from collections.abc import AsyncIterator, Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.unit.router.openai.conftest import Router, running_router, saying
from tests.unit.router.openai.responses.conftest import CALLS, HABITS, TOOLS, WIDE

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather"}}]
STEER: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
NAMED: Any = {"type": "function", "name": "weather"}

# vLLM's, and of the older clients of OpenAI.
MORE = {
    "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs", "reasoning", "reasoning_content", "service_tier",
    "max_model_len", "parent", "bytes", "store", "name",
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talking_router() -> AsyncIterator[Router]:
    """It thinks, says something, and calls a tool twice."""
    async with running_router(saying(CALLS), habits=HABITS, limits=WIDE) as router:
        yield router


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def check(kind: Any, data: Any) -> Any:
    value = _adapter(kind).validate_json(json.dumps(data), strict=True)
    assert set(_unknown(value)) <= MORE
    return value


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _unknown(entry)


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    "body",
    [
        {}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"tools": CHAT_TOOLS}, {"max_tokens": 3}, {"stop": "l"},
        {"return_token_ids": True},
    ],
    ids=range(7),
)  # fmt: skip
async def test_chats(talking_router: Router, body: dict[str, Any]) -> None:
    check(ChatCompletion, (await talking_router.chat(**body)).json())
    for options in ({}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        for chunk in events(await talking_router.chat(stream=True, stream_options=options, **body)):
            check(ChatCompletionChunk, chunk)


@pytest.mark.parametrize(
    "body", [{}, {"logprobs": 2}, {"n": 2}, {"echo": True}, {"max_tokens": 3}, {"prompt_logprobs": 1}]
)
async def test_completions(talking_router: Router, body: dict[str, Any]) -> None:
    check(Completion, (await talking_router.complete(**body)).json())
    if "prompt_logprobs" in body:
        return
    for chunk in events(await talking_router.complete(stream=True, stream_options={"include_usage": True}, **body)):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null in chunks, whatever the type says
        check(Completion, chunk)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"tools": TOOLS},
        {"max_output_tokens": 3}, {"max_output_tokens": 30},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
        {"tools": TOOLS, "tool_choice": NAMED}, {"tools": TOOLS, "tool_choice": STEER}, {"truncation": "disabled"},
        {"reasoning": {"effort": "low", "summary": "auto"}}, {"metadata": {"a": "b"}, "max_tool_calls": 3, "user": "u"},
        {"truncation": "auto"},
        {"instructions": "Be brief.", "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "k"},
    ],
    ids=range(13),
)  # fmt: skip
async def test_responses(talking_router: Router, body: dict[str, Any]) -> None:
    whole = (await talking_router.post("/v1/responses", input="hi", **body)).json()
    check(Response, whole)
    told = events(await talking_router.post("/v1/responses", input="hi", stream=True, **body))
    for event in told:
        check(ResponseStreamEvent, event)
    for response_id in (whole["id"], told[-1]["response"]["id"]):
        stored = (await talking_router.http.get(f"/v1/responses/{response_id}")).json()
        assert stored in (whole, told[-1]["response"])


async def test_the_items_that_a_response_answers(talking_router: Router) -> None:
    """However they were sent, they are told of in one way, and mean the same when they are sent as they are told."""
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    sent: Any = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "c"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "sun"},
        {"type": "message", "role": "user", "content": "e", "id": "mine"},
    ]
    answer = (await talking_router.post("/v1/responses", input=sent)).json()
    path = f"/v1/responses/{answer['id']}/input_items?order=asc"
    told = (await talking_router.http.get(path)).json()
    items = check(ResponseItemList, told).data
    assert [type(item).__name__ for item in items] == [
        *["ResponseInputMessageItem"] * 2,
        *["ResponseOutputMessage"] * 2,
        *("ResponseReasoningItem", "ResponseFunctionToolCallItem", "ResponseFunctionToolCallOutputItem"),
        "ResponseInputMessageItem",
    ]
    assert items[-1].id == "mine"
    await talking_router.post("/v1/responses", input=told["data"])
    again, once_more = talking_router.dispatcher.requests[-2:]
    assert again.prompt_token_ids == once_more.prompt_token_ids


async def test_the_models(talking_router: Router) -> None:
    for card in (await talking_router.http.get("/v1/models")).json()["data"]:
        check(Model, card)
