"""Both halves together: HTTP at the door, the real dispatcher, fake nodes over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from kvasir.router.app import create_app
from kvasir.router.auth import ApiKeys
from kvasir.router.http_server import running_http_server
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.api import OpenAIApi
from tests.fake_cluster import FakeCluster, fake_cluster
from tests.fake_node import expected_tokens
from tests.unit.router.openai.conftest import TOKENIZER, ids


@asynccontextmanager
async def whole_router() -> AsyncIterator[tuple[httpx.AsyncClient, FakeCluster]]:
    async with fake_cluster() as cluster:
        metrics = RouterMetrics(cluster.metrics)  # beside the dispatcher's own: no name is taken twice
        api = OpenAIApi(
            cluster.dispatcher,
            TOKENIZER,
            None,
            metrics,
            model_names=["m"],
            max_request_bytes=1 << 20,
            max_logprobs=5,
        )
        app = create_app(api, cluster.dispatcher, ApiKeys([]), cluster.metrics, metrics)
        async with (
            running_http_server(app, "127.0.0.1", 0, grace_s=1) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client,
        ):
            yield client, cluster


async def test_a_prompt_goes_in_and_tokens_come_out() -> None:
    async with whole_router() as (client, cluster):
        assert (await client.get("/ready")).status_code == 200
        prompt = ids("<s>some prompt that is longer than a block")
        body = {"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "seed": 0}
        answer = (await client.post("/v1/completions", json=body)).json()
        expected = expected_tokens(prompt, 12)
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["completion_tokens"] == 12
        await cluster.settle()


async def test_clients_that_leave_free_everything() -> None:
    async with whole_router() as (client, cluster):
        body = {"model": "m", "prompt": "x" * 40, "max_tokens": 100, "stream": True, "ignore_eos": True}
        for delay_s in (0.0, 0.01, 0.05, 0.1):
            asking = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
            await asyncio.sleep(delay_s)
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await cluster.settle()
        assert (await client.post("/v1/completions", json={"model": "m", "prompt": "x"})).status_code == 200
