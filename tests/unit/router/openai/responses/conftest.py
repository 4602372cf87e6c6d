"""A router that is asked for responses, and what comes back as the official client reads it."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from kvasir.router.openai.reading import ModelHabits
from tests.unit.router.openai.conftest import LIMITS, TOKENIZER, Router, running_router, saying

HABITS = ModelHabits(tool_format="hermes", reasoning_format="qwen3")
WIDE = replace(LIMITS, max_model_len=8000, max_prompt_tokens=7000)
TEXT = "hello wörld"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}}]
CALLS = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>{"name": "weather", "arguments": {"a": "}"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide_router() -> AsyncIterator[Router]:
    async with running_router(saying(TEXT), limits=WIDE) as router:
        yield router


@pytest.fixture
def router(wide_router: Router) -> Router:
    wide_router.dispatcher.requests.clear()
    return wide_router


def prompt_of(router: Router) -> str:
    return TOKENIZER.decode([*router.dispatcher.requests[-1].prompt_token_ids])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Each is named as its type, numbered, and what the official client's types say."""
    assert response.status_code == 200, response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        event_id, name, data = block.split("\n")
        assert event_id.endswith(f":{number + 1}")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        events.append(event)
    return events


async def ask(router: Router, **body: Any) -> httpx.Response:
    return await router.post("/v1/responses", **{"input": "hi", **body})
