"""Limits of a key, tenants kept apart, and a request's own time, as clients meet them."""

import time

import openai
import pytest

from kvasir.router.tenants.tenant import Limits
from tests.unit.router.openai.conftest import running_router, saying


async def test_too_many_requests_are_a_429_that_the_official_client_knows() -> None:
    limits = Limits(requests_per_minute=1)
    async with running_router(saying("x"), api_keys=["a", "b"], key_limits=limits) as router:
        start_s = time.monotonic()
        assert (await router.complete()).status_code == 200
        for stream in (False, True):
            refused = await router.chat(stream=stream)
            assert refused.status_code == 429
            assert 60 - (time.monotonic() - start_s) <= int(refused.headers["retry-after"]) <= 60
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            assert "'" not in error["message"]
        with pytest.raises(openai.RateLimitError):
            await router.openai.completions.create(model="m", prompt="p")
        other = router.openai.with_options(api_key="b")
        assert (await other.completions.create(model="m", prompt="p")).choices[0].text == "x"
        assert len(router.dispatcher.requests) == 2
        assert await router.metric("kvasir:router_requests_limited_total") == 3
        assert await router.metric('kvasir:router_requests_total{endpoint="chat/completions"') == 2


async def test_headers_say_how_a_key_stands() -> None:
    limits = Limits(requests_per_minute=2, tokens_per_minute=600)
    async with running_router(saying("x"), api_keys=["a"], key_limits=limits) as router:
        start_s = time.monotonic()
        whole = (await router.complete(prompt=[1] * 100)).headers
        named = {name.removeprefix("x-ratelimit-"): value for name, value in whole.items() if "ratelimit" in name}
        assert named == {
            "limit-requests": "2",
            "remaining-requests": "1",
            "reset-requests": "30s",
            "limit-tokens": "600",
            "remaining-tokens": "500",
            "reset-tokens": "10s",
        }
        streamed = (await router.complete(prompt=[1] * 100, stream=True)).headers
        assert streamed["x-ratelimit-remaining-requests"] == "0"
        filled = 10 * (time.monotonic() - start_s)
        assert 390 <= int(streamed["x-ratelimit-remaining-tokens"]) <= 400 + filled
        refused = await router.complete()
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-requests"]) == (429, "0")
        assert not [name for name in (await router.http.get("/v1/models")).headers if "ratelimit" in name]
    async with running_router(saying("x"), api_keys=["a"]) as router:
        assert not [name for name in (await router.complete()).headers if "ratelimit" in name]


async def test_a_bad_request_costs_nothing() -> None:
    limits = Limits(requests_per_minute=1)
    async with running_router(saying("x"), api_keys=["a"], key_limits=limits) as router:
        assert (await router.complete(n=-1)).status_code == 400
        assert (await router.complete(model="other")).status_code == 404
        assert (await router.complete()).status_code == 200


async def test_a_place_is_free_when_its_stream_has_ended_or_was_left() -> None:
    limits = Limits(max_concurrent_requests=1)
    async with running_router(saying("abc"), api_keys=["a"], key_limits=limits) as router:
        for _ in range(3):
            async with router.http.stream(
                "POST", "/v1/completions", json={"model": "m", "prompt": "p", "stream": True}
            ) as response:
                assert response.status_code == 200
                await anext(response.aiter_lines())
            assert (await router.complete()).status_code in (200, 429)  # it may take a turn to be noticed
            while (await router.complete()).status_code == 429:
                pass


async def test_tenants_kept_apart_share_no_salt() -> None:
    async with running_router(saying("x"), api_keys=["a", "b"], isolates_tenants=True) as router:
        await router.complete()
        await router.complete(cache_salt="mine")
        await router.openai.with_options(api_key="b").completions.create(model="m", prompt="p")
        await router.complete()
        first, salted, other, again = [request.cache_salt for request in router.dispatcher.requests]
        assert len({first, salted, other}) == 3
        assert first == again


async def test_a_requests_own_time_as_field_or_header() -> None:
    async with running_router(saying("x")) as router:
        await router.complete(timeout=2.5)
        await router.chat(timeout=3)
        await router.http.post(
            "/v1/completions", json={"model": "m", "prompt": "p"}, headers={"x-request-timeout": "0.5"}
        )
        await router.http.post("/v1/responses", json={"model": "m", "input": "p", "timeout": 7})
        await router.complete()
        assert [request.deadline_s for request in router.dispatcher.requests] == [2.5, 3, 0.5, 7, None]
        for wrong in ("soon", "-1", "nan", "inf", ""):
            answer = await router.http.post(
                "/v1/completions", json={"model": "m", "prompt": "p"}, headers={"x-request-timeout": wrong}
            )
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout"), wrong
        assert (await router.complete(timeout=0)).status_code == 400


async def test_a_batch_of_prompts_is_one_request() -> None:
    """As at OpenAI. Each prompt counted as one, so that no batch larger than the limits could ever be served, and what
    had been refused had cost all the same."""
    limits = Limits(requests_per_minute=3, max_concurrent_requests=2)
    async with running_router(saying("abc"), api_keys=["a"], key_limits=limits) as router:
        for stream in (False, True):
            answer = await router.complete(prompt=["a", "bb", "ccc", "dddd"], stream=stream)
            assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await router.complete()).status_code == 200
        assert (await router.complete(prompt=["a", "b"])).status_code == 429
