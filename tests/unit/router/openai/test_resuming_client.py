"""The example client of the documentation, through a connection that breaks again and again."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from docs import resuming_client
from kvasir.router.types import RoutedRequest
from tests.fake_dispatcher import Step, play
from tests.tcp_proxy import TcpProxy
from tests.unit.router.openai.conftest import END, ids, running_router, saying
from tests.waiting import until

TEXT = "a story that goes on and on, " * 4


async def test_the_example_client_tells_the_whole_story_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_client, "PAUSE_S", 0.01)
    cut = random.Random(3)
    told: list[str] = []
    token_ids = ids(TEXT)
    num_released = 0

    def script(request: RoutedRequest) -> Iterator[Step]:
        for number, step in enumerate(play([*token_ids, END], request)):
            while number >= num_released:
                yield 0.001
            yield step

    def listen(url: str, key: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        chunks = resuming_client.chunks(url, body, {"Authorization": f"Bearer {key}"})
        for chunk in chunks:
            if text := chunk["choices"][0]["delta"].get("content"):
                told.append(text)  # noqa: PERF401  (others look at it meanwhile)

    async with (
        running_router(script, api_keys=["k"]) as router,  # type: ignore[arg-type]
        TcpProxy(router.url.removeprefix("http://")) as proxy,
        asyncio.timeout(60),
    ):
        listening = asyncio.create_task(asyncio.to_thread(listen, f"http://{proxy.address}/v1/chat/completions", "k"))
        while num_released < len(token_ids):
            num_released += cut.randint(5, 20)
            await until(lambda: len(told) >= min(num_released, len(token_ids)))  # noqa: B023
            proxy.cut()
        num_released += 1  # the end
        await listening
        assert "".join(told) == TEXT
        assert proxy.num_connections > 2
        assert len(router.dispatcher.requests) == 1


async def test_what_cannot_go_on_is_raised() -> None:
    def ask(url: str, **body: Any) -> None:
        list(resuming_client.chunks(url, {"model": "m", "prompt": "p", **body}))

    async with running_router(saying("x")) as router:
        with pytest.raises(RuntimeError, match="does not exist"):
            await asyncio.to_thread(ask, f"{router.url}/v1/completions", model="other")
