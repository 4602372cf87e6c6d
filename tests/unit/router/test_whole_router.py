"""Both halves together: HTTP at the door, the real dispatcher, fake nodes over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.proto import common_pb2
from kvasir.router.app import create_app
from kvasir.router.auth import api_keys as keys_of
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.http_server import running_http_server
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.bodies import Bodies
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.reading import ModelHabits
from kvasir.router.openai.responses.api import ResponsesApi
from kvasir.router.openai.responses.store import MemoryResponseStore
from kvasir.router.openai.serving import Serving
from kvasir.router.openai.tokens import TokensApi
from kvasir.router.overview import OwnOverview
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.tenants.budgets import MemoryBudgets
from kvasir.router.tenants.limiter import Limiter
from kvasir.router.text.chat_renderer import ChatRenderer
from tests.fake_cluster import FakeCluster, fake_cluster
from tests.fake_request import expected_tokens
from tests.unit.router.openai.conftest import TOKENIZER, ids
from tests.waiting import until


@asynccontextmanager
async def whole_router(**config: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeCluster]]:
    async with fake_cluster(config=config) as cluster:
        metrics = RouterMetrics(cluster.metrics)  # beside the dispatcher's own: no name is taken twice
        renderer = ChatRenderer(None)
        bodies = Bodies(lambda: (1, 1), 1 << 20)  # no body here is so large that it starts its process
        limiter = Limiter(MemoryBudgets(), 600, lambda tenant, what: metrics.limited(tenant=tenant, limit=what))
        api = OpenAIApi(
            TenantBackend(cluster.dispatcher, limiter, isolates=False),
            TOKENIZER,
            renderer,
            model_names=["m"],
            serving=Serving(metrics, bodies, KeptStreams(max_grace_s=60, max_streams=4)),
            max_logprobs=5,
            habits=ModelHabits(),
            grammars=GrammarChecker(Path("tokenizer.json")),
            created=1_700_000_000,
        )
        responses = ResponsesApi(api, MemoryResponseStore(ttl_s=60, max_bytes=1 << 20))
        tokens = TokensApi(cluster.dispatcher, TOKENIZER, renderer, model_names=["m"], bodies=bodies)
        overview = OwnOverview(cluster.dispatcher, cluster.metrics, metrics)
        app = create_app(api, responses, tokens, overview, keys_of([]), metrics)
        async with (
            running_http_server(app, "127.0.0.1", 0, grace_s=1) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
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


FAST_LOSS = {"heartbeat_timeout_s": 0.6, "node_wait_s": 0.5}


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """A whole JSON body with its status: once, whatever a decode node said became a 200 without a body."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [(common_pb2.FAILURE_CODE_INVALID_REQUEST, 400), (common_pb2.FAILURE_CODE_NUMERICAL, 500)],
    ids=["invalid", "numerical"],
)
async def test_what_a_decode_node_refuses_has_its_status(stream: bool, code: int, status: int) -> None:
    async with whole_router() as (client, cluster):
        cluster.prefill[0].behaviour.chunk_s = 3600  # the decode node speaks before the first token is there
        cluster.decode[0].behaviour.fail_starts = [code]
        body = {"model": "m", "prompt": "x" * 40, "max_tokens": 12, "stream": stream}
        check_error(await client.post("/v1/completions", json=body), status)
        cluster.prefill[0].behaviour.chunk_s = 0
        await cluster.settle()
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_node_that_dies_before_the_first_token_is_a_503(stream: bool) -> None:
    async with whole_router(**FAST_LOSS) as (client, cluster):
        cluster.prefill[0].behaviour.chunk_s = 60.0
        body = {"model": "m", "prompt": "x" * 400, "max_tokens": 12, "stream": stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: any(not one.is_canary for one in cluster.decode[0].requests))
        await cluster.decode[0].die()
        check_error(await asking, 503)
        cluster.prefill[0].behaviour.chunk_s = 0
        await until(lambda: not cluster.dispatcher.is_ready)
        check_error(await client.post("/v1/completions", json=body), 503)  # nobody is there at all
        await cluster.settle()


async def test_a_decode_node_that_dies_in_mid_stream_ends_the_stream_with_an_error() -> None:
    async with whole_router(**FAST_LOSS) as (client, cluster):
        cluster.decode[0].behaviour.token_s = 0.05
        body = {"model": "m", "prompt": "x" * 40, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.aiter_lines()
            events = [await anext(lines) for _ in range(6)]
            await cluster.decode[0].die()
            events += [line async for line in lines]
        events = [line for line in events if line]
        events = [line for line in events if line.startswith("data: ")]
        assert all('"finish_reason":null' in line for line in events[:-1])
