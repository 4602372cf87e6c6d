"""The OpenAPI document says what is true: its routes are the app's; what is answered is held to it here, and wherever
the HTTP half is tested."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from kvasir.router.docs.openapi import openapi_document
from kvasir.router.docs.page import docs_page
from kvasir.router.openai.reading import ModelHabits
from tests.unit.router.openai.conftest import running_router, saying
from tests.unit.router.openai.documented import check_events

DOCUMENT = openapi_document()
THINKING_AND_CALLING = '<think>hm</think>Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOL: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}


def test_its_references_lead_somewhere_and_its_schemas_are_schemas() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    text = json.dumps(DOCUMENT)
    assert {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]} == schemas.keys()
    assert "$defs" not in text
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_it_has_the_routes_that_there_are() -> None:
    async with running_router(saying("x")) as router:
        served = {
            (method, route.path.replace(":path", ""))
            for route in router.app.routes
            if isinstance(route, Route) and route.include_in_schema
            for method in (route.methods or ()) - {"HEAD"}
        }
        documented = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
        assert documented == served
        shown = await router.http.get("/openapi.json")
        assert shown.json() == json.loads(json.dumps(openapi_document(["m", "org/m"])))
        assert shown.json()["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"] == ["m", "org/m"]
        page = await router.http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "/v1/chat/completions" in page.text


def test_the_page_shows_all_of_it_and_runs_nothing() -> None:
    page = docs_page(DOCUMENT)
    assert all(path in page for path in DOCUMENT["paths"])
    assert all(f"id='{name}'" in page for name in DOCUMENT["components"]["schemas"])
    assert "<script" not in page
    assert "http" not in page.replace("httpx", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_of_all_kinds_are_what_it_says(stream: bool) -> None:
    """Every answer of `router.http` that is JSON is held to it anyway; here are those with the most in them."""
    habits = ModelHabits(tool_format="hermes", reasoning_format="qwen3")
    everything: dict[str, Any] = {"return_token_ids": True, "stream": stream}
    if stream:
        everything["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    async with running_router(saying(THINKING_AND_CALLING), habits=habits) as router:
        chat = {"logprobs": True, "top_logprobs": 2, "tools": [{"type": "function", "function": TOOL}], **everything}
        check_stream("/v1/chat/completions", await router.chat(**chat), stream)
        check_stream("/v1/completions", await router.complete(logprobs=2, max_tokens=100, n=2, **everything), stream)
        responses = {"input": "hi", "tools": [{"type": "function", **TOOL}], "top_logprobs": 2, "stream": stream}
        check_stream("/v1/responses", await router.post("/v1/responses", **responses), stream)
        await router.post("/v1/responses", input="hi", max_output_tokens=3)
        for path in ("/health", "/ready", "/version", "/load", "/v1/models", "/v1/models/m", "/v1/models/x"):
            await router.http.get(path)


def check_stream(path: str, response: Any, stream: bool) -> None:
    assert response.status_code == 200, response.text
    if stream:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        check_events(path, [json.loads(line.removeprefix("data: ")) for line in lines])


def test_a_wrong_event_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        check_events("/v1/chat/completions", [{"id": 5}])
