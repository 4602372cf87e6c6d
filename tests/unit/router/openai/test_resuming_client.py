"""The example client of the documentation, through a connection that breaks again and again."""

import asyncio
import random
from typing import Any

import pytest

from docs import resuming_client
from tests.tcp_proxy import TcpProxy
from tests.unit.router.openai.conftest import running_router, saying

TEXT = "a story that goes on and on, " * 4


async def test_the_example_client_tells_the_whole_story_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_client, "PAUSE_S", 0.01)
    cut = random.Random(3)
    told: list[str] = []

    def listen(url: str, key: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        chunks = resuming_client.chunks(url, body, {"Authorization": f"Bearer {key}"})
        told.extend(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    async with (
        running_router(saying(TEXT, pause_s=0.006), api_keys=["k"]) as router,
        TcpProxy(router.url.removeprefix("http://")) as proxy,
        asyncio.timeout(30),
    ):
        listening = asyncio.create_task(asyncio.to_thread(listen, f"http://{proxy.address}/v1/chat/completions", "k"))
        while not listening.done():
            await asyncio.sleep(cut.uniform(0.05, 0.2))
            if told:
                proxy.cut()
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
