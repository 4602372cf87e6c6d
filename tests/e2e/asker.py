"""A client for tests that ask many things at once."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from tests.cluster import Cluster
from tests.plain_http import NO_TLS

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "return_token_ids": True}


class Asker:
    """One client; every answer is a 200."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def whole(self, path: str = COMPLETIONS, **body: Any) -> Any:
        response = await self._client.post(path, json={"model": self._model, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def chunks(self, path: str = COMPLETIONS, **body: Any) -> list[Any]:
        """Every event is a line of JSON in UTF-8; the last is [DONE]."""
        response = await self._client.post(path, json={"model": self._model, "stream": True, **body})
        assert response.status_code == 200, response.text
        lines = response.content.decode("utf-8", errors="strict").split("\n")
        *events, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    async def ids(self, prompt: str | Sequence[int], **body: Any) -> list[int]:
        ids: list[int] = (await self.whole(prompt=prompt, **GREEDY, **body))["choices"][0]["token_ids"]
        return ids

    async def leave(self, **body: Any) -> None:
        """Ask, read the beginning of the answer, and go."""
        async with self._client.stream("POST", COMPLETIONS, json={"model": self._model, **body}) as response:
            await anext(response.aiter_bytes())


def ask(cluster: Cluster, script: Callable[[Asker], Awaitable[T]]) -> T:
    async def run() -> T:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120, verify=NO_TLS) as client:
            return await script(Asker(client, cluster.model))

    return asyncio.run(run())
