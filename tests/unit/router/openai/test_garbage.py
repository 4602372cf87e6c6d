"""What is no request at all: bodies, routes and methods that nobody asked for, and any values in any fields."""

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.models import ChatBody, CompletionBody
from kvasir.router.openai.parsing import UNSUPPORTED, json_object
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.tokens import DetokenizeBody, TokenizeChatBody
from tests.unit.router.openai.conftest import Router, running_router, saying
from tests.unit.router.openai.refusals import MESSAGES, check, is_healthy

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "m", "prompt": "\xc3"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "p", "temperature": NaN}',
        b'{"model": "m", "prompt": "p", "temperature": Infinity}',
        b'{"model": "m", "prompt": "p", "temperature": 1e999}',
        b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"model": "m", "prompt": "p", "messages": ' + b"[" * 1000 + b"]" * 1000 + b', "temperature": "x"}',
        b'{"model": "m", "temperature": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"model": "m", "prompt": "p", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
    ids=range(16),
)
async def test_what_is_no_request_at_all(router: Router, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        check(await router.http.post(path, content=body))
    assert router.dispatcher.requests == []
    assert await is_healthy(router)


async def test_a_body_that_is_no_plain_text(router: Router) -> None:
    body = b'{"model": "m", "prompt": "p"}'
    for encoding, sent in (("gzip", gzip.compress(body)), ("br", body), ("x-y", body)):
        for path in ("/v1/completions", "/v1/responses", "/tokenize"):
            response = await router.http.post(path, content=sent, headers={"content-encoding": encoding})
            assert "without Content-Encoding" in check(response, 415)["message"]
    response = await router.http.post("/v1/completions", content=body, headers={"content-encoding": "Identity"})
    assert response.status_code == 200
    for wrong, what in ((gzip.compress(body), "not valid UTF-8"), (b'{"model": "\\ud800"}', "not valid JSON")):
        assert what in check(await router.http.post("/v1/completions", content=wrong))["message"]


async def test_only_what_is_said_to_be_json_is_read(router: Router) -> None:
    """As at OpenAI and with vLLM. A browser sends what any page has it send as text, or as no type at all, and asks
    only before JSON whether it may."""
    body = json.dumps({"model": "m", "prompt": "p"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", ""):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses/input_tokens", "/tokenize"):
            error = check(await router.http.post(path, content=body, headers={"content-type": kind}))
            assert error["code"] == "unsupported_content_type"
            assert repr(kind) in error["message"]
    assert router.dispatcher.requests == []
    for kind in ("application/json; charset=utf-8", "Application/JSON;charset=UTF-8", "application/vnd.api+json"):
        response = await router.http.post("/v1/completions", content=body, headers={"content-type": kind})
        assert response.status_code == 200, response.text


async def test_a_body_over_the_limit_is_413_announced_or_not() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with running_router(saying("x"), max_request_bytes=50_000) as router:
        check(await router.complete(prompt="x" * 60_000), 413)
        check(await router.http.post("/v1/completions", content=endless()), 413)
        assert check(await router.complete(prompt="x" * 40_000))["code"] == "context_length_exceeded"
        assert await is_healthy(router)


async def test_unknown_routes_and_methods(router: Router) -> None:
    for path in (
        "/page",
        "/v1",
        "/v1/completions/",
        "//v1/completions",
        "/V1/completions",
        "/v1/chat",
        "/docs/",
        "/v2/completions",
    ):
        check(await router.http.post(path, json={"model": "m", "prompt": "p"}), 404)
    check(await router.http.post("/"), 405)
    error = await router.http.get("/v1/completions")
    check(error, 405)
    assert "POST" in error.headers["allow"]
    for method in ("DELETE", "PUT", "PATCH", "OPTIONS"):
        check(await router.http.request(method, "/v1/completions"), 405)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
BODIES = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeChatBody,
    "/detokenize": DetokenizeBody,
}
FIELDS = sorted(UNSUPPORTED.keys() | {name for body in BODIES.values() for name in body.model_fields})
item_values = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "input_text"]),
        "role": st.sampled_from(["user", "assistant", "tool", "system"]),
        **dict.fromkeys(("content", "name", "arguments", "call_id", "output", "summary", "tool_calls"), json_values),
    },
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values | st.lists(item_values, max_size=3), max_size=4),
    st.sampled_from(sorted(BODIES)),
)
async def test_any_values_at_all_are_an_answer_or_a_400(router: Router, fields: dict[str, Any], path: str) -> None:
    body = {"model": "m", "prompt": "p", "messages": MESSAGES, "input": "p", "tokens": [1], "max_tokens": 3, **fields}
    response = await router.http.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        check(response, response.status_code)


async def test_millions_of_small_lists_are_refused_before_they_are_read() -> None:
    with pytest.raises(InvalidRequest, match="lists and objects"):
        json_object(b'{"prompt": [' + b"[],".join([b""] * 200_002) + b"[]]}")
    text = '{"' + '[{\\"' * 250_000 + '": 1}'  # brackets in a text are text
    assert len(json_object(text.encode())) == 1
    with pytest.raises(InvalidRequest):
        json_object(b'{"a": "' + b"[" * 300_000)
