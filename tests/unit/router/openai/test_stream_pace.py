"""When the parts of a stream are sent: each at once, the headers before a long silence, all text before the end."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from kvasir.common.errors import NodeUnavailable
from kvasir.router.openai import serving
from kvasir.router.types import RoutedRequest, TokenDelta
from tests.unit.router.openai.conftest import Router, ids, running_router, saying

BODY = {"model": "m", "prompt": "p", "stream": True}
GZIP = {"accept-encoding": "gzip, br, zstd"}


async def events_of(response: httpx.Response) -> AsyncGenerator[Any, None]:
    async with aclosing(response.aiter_lines()) as lines:
        async for line in lines:
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def test_each_token_is_sent_before_the_next_is_there() -> None:
    """Compressing layers once kept back 32 KB of a stream, so that its tokens came in bursts."""
    num_released = 1

    def script(request: RoutedRequest) -> Iterator[TokenDelta | float]:
        for number in range(5):
            while number >= num_released:
                yield 0.001
            reason = "length" if number == 4 else None
            yield TokenDelta(sequence=0, token_ids=tuple(ids("a")), finish_reason=reason)

    async with (
        running_router(script) as router,  # type: ignore[arg-type]
        asyncio.timeout(60),
        router.http.stream("POST", "/v1/completions", json=BODY, headers=GZIP) as response,
        aclosing(events_of(response)) as events,
    ):
        for number in range(1, 6):
            assert (await anext(events))["choices"][0]["text"] == "a"
            assert num_released == number
            num_released += 1
        assert (await anext(events))["choices"][0]["finish_reason"] == "length"


async def test_headers_do_not_wait_for_a_first_token_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for a while, for what fails in it has a status of its own; later it is an event of the stream."""
    monkeypatch.setattr(serving, "HEARTBEAT_S", 0.05)
    is_released = False

    def script(request: RoutedRequest) -> Iterator[Exception | float]:
        while not is_released:
            yield 0.001
        yield NodeUnavailable("all nodes are gone")

    async with running_router(script) as router, asyncio.timeout(60):  # type: ignore[arg-type]
        async with router.http.stream("POST", "/v1/completions", json=BODY) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            is_released = True
            lines = [line async for line in response.aiter_lines() if line]
        assert [line.partition("{")[0] for line in lines if line.startswith("data: ")] == ["data: "]
        assert "all nodes are gone" in lines[-1]
        assert router.dispatcher.num_running == 0


ASKED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 4}, "ABCD", "length"),
    ({"max_tokens": 5, "stop": ["CDEX"]}, "ABCDE", "length"),  # the limit comes while the rest is held back
    ({"max_tokens": 50, "stop": ["FGX"]}, "ABCDEFG", "stop"),
    ({"max_tokens": 50, "stop": ["DE"]}, "ABC", "stop"),
    ({"max_tokens": 50, "stop": ["DE"], "include_stop_str_in_output": True}, "ABCDE", "stop"),
    ({"max_tokens": 50}, "ABCDEFG", "stop"),
]


@pytest.mark.parametrize("tokens_a_step", [1, 3, 50])
async def test_who_stops_reading_at_the_finish_reason_has_all_the_text(tokens_a_step: int) -> None:
    """The last text once came in one chunk with the finish reason, and clients that stop there lost it."""
    async with running_router(saying("ABCDEFG", tokens_a_step=tokens_a_step)) as router:
        for ask in (router.chat, router.complete):
            for options, expected, reason in ASKED:
                choices = [chunk["choices"][0] async for chunk in events_of(await ask(stream=True, **options))]
                assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [reason]
                assert text_of(choices[:-1]) == expected, options
                assert text_of(choices[-1:]) == ""
                [whole] = (await ask(**options)).json()["choices"]
                assert (text_of([whole]), whole["finish_reason"]) == (expected, reason)


def text_of(choices: list[Any]) -> str:
    messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    return "".join(
        choice.get("text") or message.get("content") or "" for choice, message in zip(choices, messages, strict=True)
    )


async def test_hundreds_of_streams_that_are_left_cost_nothing() -> None:
    """Slots of streams that clients had left were not given back: all stood still after a few hundred."""
    num_streams, at_once = 200, asyncio.Semaphore(16)
    token = TokenDelta(sequence=0, token_ids=tuple(ids("a")))

    def script(request: RoutedRequest) -> Iterator[TokenDelta | float]:
        while request.sampling.max_tokens > 1:  # it does not end by itself
            yield token
            yield 0.001
        yield token._replace(finish_reason="length")

    async with running_router(script) as router, asyncio.timeout(300):  # type: ignore[arg-type]

        async def leave(after: int) -> None:
            async with (
                at_once,
                router.http.stream("POST", "/v1/completions", json=BODY) as response,
                aclosing(events_of(response)) as events,
            ):
                for _ in range(after):
                    assert (await anext(events))["choices"][0]["text"] == "a"

        await asyncio.gather(*(leave(1) for _ in range(32)))  # what stays is made once
        await at_rest(router)
        tasks_before = len(asyncio.all_tasks())
        await asyncio.gather(*(leave(1 + number % 3) for number in range(num_streams)))
        await at_rest(router)
        while len(asyncio.all_tasks()) > tasks_before:
            await asyncio.sleep(0.01)
        assert len(router.dispatcher.requests) == 32 + num_streams
        assert await router.metric("kvasir:router_requests_in_flight") == 0
        assert (await router.complete(max_tokens=1)).json()["choices"][0]["text"] == "a"


async def at_rest(router: Router) -> None:
    while router.dispatcher.num_running:
        await asyncio.sleep(0.01)
