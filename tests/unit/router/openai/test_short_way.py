"""Tokens that go from the node's message to the socket in one call: what a client sees does not show it."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

from kvasir.router.tenants.tenant import Limits
from kvasir.router.types import RoutedRequest, TokenDelta
from tests.fake_dispatcher import Step, play
from tests.unit.router.openai.conftest import LIMITS, Router, ids, running_router

TEXT = 'Words, "quotes", \\ and \n\t controls, e\u0301, 日本語, 👩‍👩‍👧; ' * 4
WIDE = replace(LIMITS, max_model_len=8000, max_prompt_tokens=7000)


def script(request: RoutedRequest) -> Sequence[Step]:
    return play(ids(TEXT), request, pause_s=0.0005)


async def events(router: Router, path: str, **body: Any) -> list[bytes]:
    """As they come, without what differs from stream to stream."""
    answer = await router.http.post(path, json={"model": "m", "stream": True, "seed": 1, "max_tokens": 4000, **body})
    assert answer.status_code == 200, answer.text
    found = [part for part in answer.content.split(b"\n\n") if part]
    numbers = [int(re.match(rb"id: [^:]+:(\d+)\n", one)[1]) for one in found]  # type: ignore[index]
    assert numbers == list(range(1, len(found) + 1))
    return [re.sub(rb'"(id|created)":("[^"]*"|\d+)', b"", one.partition(b"\n")[2]) for one in found]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"stop": ['日本語, 👩‍👩‍👧; Words, "q']},
        {"n": 3},
        {"max_tokens": 1},
    ],
    ids=str,
)
async def test_each_event_is_as_it_is_the_long_way(body: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], **body}
    async with running_router(script, limits=WIDE) as router:
        router.dispatcher.takes = True
        either_way = await events(router, "/v1/chat/completions", **chat)
        num_taken = router.dispatcher.num_taken
        router.dispatcher.takes = False
        long_way = await events(router, "/v1/chat/completions", **chat)
    assert either_way == long_way
    assert router.dispatcher.num_taken == num_taken
    assert num_taken > 40 or body == {"max_tokens": 1}


async def test_what_went_past_the_limiter_is_charged_all_the_same() -> None:
    limits = Limits(tokens_per_minute=1000)
    async with running_router(script, limits=WIDE, api_keys=["a"], key_limits=limits) as router:
        router.dispatcher.takes = True
        await events(router, "/v1/completions", prompt="p" * 900)
        assert router.dispatcher.num_taken > 100
        refused = await router.complete(prompt="p")
        assert refused.status_code == 429, refused.text


async def test_a_client_that_reads_slowly_loses_nothing_and_keeps_nobody() -> None:
    """More than all buffers hold: the short way is closed while the connection is full, and then the long one goes."""
    num_tokens, all_made = 60_000, asyncio.Event()

    def many(request: RoutedRequest) -> Iterator[Step]:
        for number in range(num_tokens):
            yield TokenDelta(sequence=0, token_ids=tuple(ids("a")), finish_reason=None)
            if number % 100 == 0:
                yield 0.0
        yield TokenDelta(sequence=0, token_ids=(), finish_reason="length")
        all_made.set()

    async with running_router(many, limits=replace(WIDE, max_model_len=10**7)) as router:  # type: ignore[arg-type]
        router.dispatcher.takes = True
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1 << 16)
        body = orjson.dumps({"model": "m", "prompt": "p", "stream": True, "max_tokens": 10**6})
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(300):
            await reader.readuntil(b"\r\n\r\n")
            while router.dispatcher.num_taken < 1000:
                await asyncio.sleep(0.001)
            for _ in range(200):
                assert (await router.http.get("/health")).status_code == 200
            assert not all_made.is_set(), "nobody has read so much"
            content = await reader.read(-1)
        writer.close()
    assert content.count(b'"text":"a"') == num_tokens
    assert content.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
