"""What `kvasir bench routing` sends, and what it makes of what it is told; no clock decides anything here."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvasir.bench.lab import routing
from kvasir.bench.lab.routing import Shape, Turn, as_markdown, converse, main

SHAPE = Shape(num_conversations=3, num_turns=3, first_len=20, next_len=4, output_len=5)


class CachingServer:
    """Has one prefix cache of all that it has read and said; the n-th answer is n, n, n, ..."""

    def __init__(self) -> None:
        self.url = ""
        self.num_missing = 0  # tokens of each answer
        self.restart()

    def restart(self) -> None:
        self.prompts: list[list[int]] = []
        self._known: list[list[int]] = [[]]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert (body["ignore_eos"], body["return_token_ids"], body["temperature"]) == (True, True, 0)
        prompt: list[int] = body["prompt"]
        self.prompts.append(prompt)
        cached = max(num_common(prompt, known) for known in self._known)
        answer = [len(self.prompts)] * (body["max_tokens"] - self.num_missing)
        self._known.append([*prompt, *answer])
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "prompt_tokens_details": details}
        chunks: list[dict[str, Any]] = [
            *({"choices": [{"text": "x", "token_ids": [token]}]} for token in answer),
            {"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        ]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return web.Response(text=events + "data: [DONE]\n\n", content_type="text/event-stream")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "caching"}]})


def num_common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CachingServer]:
    monkeypatch.setattr(routing, "_TOLD_AFTER_S", 0.0)
    caching, app = CachingServer(), web.Application()
    app.router.add_post("/v1/completions", caching.complete)
    app.router.add_get("/v1/models", caching.models)
    async with TestServer(app) as running:
        caching.url = str(running.make_url("")).rstrip("/")
        yield caching


async def test_each_turn_sends_the_conversation_so_far_and_a_little_more(server: CachingServer) -> None:
    turns = await converse(server.url, SHAPE)
    assert [turn.number for turn in turns] == [0] * 3 + [1] * 3 + [2] * 3
    assert [turn.num_prompt_tokens for turn in turns] == [20] * 3 + [29] * 3 + [38] * 3
    assert [turn.num_cached_tokens for turn in turns] == [0] * 3 + [25] * 3 + [34] * 3, "all but what is new"
    assert all(turn.ttft_s > 0 for turn in turns)
    assert len({tuple(prompt) for prompt in server.prompts[:3]}) == 3
    for number, first in enumerate(server.prompts[:3], start=1):
        (second,) = (prompt for prompt in server.prompts[3:6] if prompt[:20] == first)
        (third,) = (prompt for prompt in server.prompts[6:] if prompt[:20] == first)
        assert second[:25] == first + [number] * 5
        assert third[:29] == second


async def test_every_way_of_choosing_gets_the_same(server: CachingServer) -> None:
    await converse(server.url, SHAPE)
    sent = list(server.prompts)
    server.restart()
    await converse(server.url, SHAPE)
    assert server.prompts == sent


async def test_warming_up_leaves_nothing_behind_that_would_help(server: CachingServer) -> None:
    warm_up = await converse(server.url, SHAPE, warms_up=True)
    assert len(warm_up) == 2
    assert [turn.num_cached_tokens for turn in await converse(server.url, SHAPE)][:3] == [0, 0, 0]


async def test_an_answer_that_is_too_short_is_no_measurement(server: CachingServer) -> None:
    server.num_missing = 1
    with pytest.raises(ValueError, match="4 tokens came, not 5"):
        await converse(server.url, SHAPE)


async def test_the_page_of_a_server_that_runs_already(server: CachingServer, tmp_path: Path) -> None:
    argv = ["--url", server.url, "--output", str(tmp_path), "--conversations", "2", "--turns", "2"]
    argv += ["--first-len", "20", "--next-len", "4", "--output-len", "5"]
    assert await asyncio.wait_for(asyncio.to_thread(main, argv), 60) == 0
    (row,) = [line for line in (tmp_path / "routing.md").read_text().splitlines() if server.url in line]
    assert row.endswith(f"| {25 / 29:.0%} |")


def test_the_page_has_first_turns_later_turns_and_the_longest_wait() -> None:
    waits_s = {0: (0.1, 0.3, 0.9), 1: (0.02, 0.04), 2: (0.05, 0.8)}
    turns = [Turn(number, wait_s, 100, 90 * (number > 0)) for number, waits in waits_s.items() for wait_s in waits]
    page = as_markdown({}, SHAPE, {"round_robin": turns, "one turn": turns[:3]})
    assert "| round_robin | 300 | 45 | 800 | 90% |" in page
    assert "| one turn | 300 | - | - | - |" in page
    assert "3 conversations of 3 turns" in page
