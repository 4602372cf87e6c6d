"""Clients leave at each point of a request's way, a hundred times each: all is back at once, and nothing adds up.

`make test-soak`. KVASIR_TEST_SOAK_TIMES changes how often.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests import faulty
from tests.cluster import Cluster
from tests.service import Service
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

TIMES = int(os.environ.get("KVASIR_TEST_SOAK_TIMES", "100"))
AT_ONCE = 4
LENGTH = 300  # tokens of a prompt: 19 blocks
# When the step in progress has ended, of 64 tokens: that takes a tenth of a second, and seconds where others want the
# same cores. A lease would end after 30.
BACK_WITHIN_S = 10.0
AT_REST = {
    "vllm:num_requests_running": 0,
    "vllm:num_requests_waiting": 0,
    "kvasir:requests_loading": 0,
    "kvasir:session_requests": 0,
    "kvasir:kv_leased_blocks": 0,
    "kvasir:kv_leases": 0,
    "kvasir:kv_blocks_lent": 0,
    "kvasir:kv_transfers_running": 0,
}


@pytest.fixture(scope="module", params=["tests.faulty:FaultyTcp", "tests.faulty:FaultySharedStorage"])
def slow_cluster(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Cluster]:
    """Every block takes its time, so that there is a middle of a transfer to leave in."""
    late = [{"kind": "delay", "delay_s": 0.02, "times": 1_000_000_000}]
    with Cluster(
        model_dir,
        request.param,
        prefill_args=("--max-num-batched-tokens", "64"),
        decode_args=("--kv-write-back",) if "Storage" in request.param else (),
        environment={faulty.VARIABLE: json.dumps(late)},
    ) as cluster:
        yield cluster


class Client:
    def __init__(self, cluster: Cluster, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._dice = random.Random(7)
        self.cluster = cluster

    async def leave_after(self, num_tokens: int, seconds: float) -> None:
        """Read so many tokens, wait so long for more, and go."""
        prompt = [self._dice.randrange(50, 49_000) for _ in range(LENGTH)]
        body = {"model": self._model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds if num_tokens == 0 else 60),
                self._client.stream("POST", "/v1/completions", json=body) as response,
            ):
                num_seen = 0
                async for line in response.aiter_lines():
                    num_seen += line.startswith("data: {")
                    if num_seen >= num_tokens > 0:
                        await asyncio.sleep(seconds)
                        return


async def while_queued(client: Client) -> None:
    await client.leave_after(0, 0.02)


async def in_prefill(client: Client) -> None:
    await client.leave_after(0, random.uniform(0.1, 0.5))


async def between(client: Client) -> None:
    """The first token is here; the decode node has just heard of it."""
    await client.leave_after(1, 0)


async def in_transfer(client: Client) -> None:
    await client.leave_after(1, random.uniform(0.02, 0.3))


async def after_token_1(client: Client) -> None:
    await client.leave_after(3, 0)


def is_at_rest(node: Service) -> bool:
    metrics = node.metrics()
    free = metrics["kvasir:free_blocks"] == metrics["kvasir:total_blocks"]
    return free and all(metrics[name] == value for name, value in AT_REST.items())


def seconds_until_rest(cluster: Cluster) -> float:
    started, nodes = time.monotonic(), (*cluster.prefill, *cluster.decode)
    while not all(map(is_at_rest, nodes)):
        assert time.monotonic() - started < BACK_WITHIN_S, [node.metrics() for node in nodes]
        time.sleep(0.02)
    return time.monotonic() - started


async def leave_often(cluster: Cluster, leave: Callable[[Client], Awaitable[None]]) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
        one = Client(cluster, client, cluster.model)
        seats = asyncio.Semaphore(AT_ONCE)

        async def once() -> None:
            async with seats:
                await leave(one)

        await asyncio.gather(*(once() for _ in range(TIMES)))


@pytest.mark.parametrize("leave", [while_queued, in_prefill, between, in_transfer, after_token_1])
def test_everything_comes_back(slow_cluster: Cluster, leave: Callable[[Client], Awaitable[None]]) -> None:
    asyncio.run(leave_often(slow_cluster, leave))
    print(f"{leave.__name__}: back after {seconds_until_rest(slow_cluster):.2f} s")
    expired = slow_cluster.total(slow_cluster.prefill, "kvasir:kv_leases_expired_total")
    assert expired == 0, "a lease had to end by itself"
    answer = slow_cluster.client().completions.create(model=slow_cluster.model, prompt="hello", max_tokens=4)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_frozen_prefill_node_pins_nothing_on_the_decode_node(slow_cluster: Cluster) -> None:
    """Frozen in mid-transfer, with a client that leaves: once the blocks were held for ever."""
    prefill, decode = slow_cluster.prefill[0], slow_cluster.decode[0]

    async def leave_while_frozen() -> None:
        async with httpx.AsyncClient(base_url=slow_cluster.url, timeout=120) as client:
            one = Client(slow_cluster, client, slow_cluster.model)
            leaving = asyncio.create_task(one.leave_after(1, 60))
            await asyncio.to_thread(wait_until, lambda: decode.metrics()["kvasir:kv_transfers_running"], 60, "transfer")
            prefill.freeze()
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    for _ in range(max(2, TIMES // 20)):
        asyncio.run(leave_while_frozen())
        try:
            wait_until(lambda: is_at_rest(decode), BACK_WITHIN_S, "the decode node holds nothing")
        finally:
            prefill.thaw()
        slow_cluster.wait_ready()
        wait_until(lambda: is_at_rest(prefill), 30, "the prefill node holds nothing")
