"""200 requests dropped by their clients at random points: everything comes back, by number."""

import asyncio
import random
import time

import httpx
import pytest

from tests.cluster import Cluster
from tests.plain_http import NO_TLS
from tests.service import Service
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NUM_REQUESTS = 200
CONCURRENCY = 16
WITHIN_S = 60.0

# What must be zero when nobody asks for anything.
NODE_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "kvasir:kv_leased_blocks",
    "kvasir:session_requests",
)
ROUTER_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvasir:router_requests_in_flight")


def left_behind(cluster: Cluster) -> dict[str, float]:
    """What is still held, by name; empty: nothing. Blocks that only the prefix cache holds count as free."""
    held: dict[str, float] = {}
    for service in cluster.services:
        samples = service.metrics()
        is_node = service is not cluster.router
        for name in NODE_GAUGES if is_node else ROUTER_GAUGES:
            held[f"{service.name} {name}"] = samples[name]
        if is_node:
            held[f"{service.name} blocks"] = samples["kvasir:total_blocks"] - samples["kvasir:free_blocks"]
    return {name: value for name, value in held.items() if value}


def sockets_and_tasks(cluster: Cluster) -> dict[str, float]:
    counts = {f"{service.name} sockets": float(service.num_open_sockets) for service in cluster.services}
    for node in [*cluster.prefill, *cluster.decode]:
        counts[f"{node.name} tasks"] = node.metrics()["kvasir:asyncio_tasks"]
    return counts


def leases_expired(cluster: Cluster) -> float:
    return cluster.total([*cluster.prefill, *cluster.decode], "kvasir:kv_leases_expired_total")


def test_dropped_requests_leave_nothing_behind(cluster: Cluster) -> None:
    rng = random.Random(7)
    asyncio.run(drop_requests(cluster, rng, 8))  # connections that stay are made once
    wait_until(lambda: not left_behind(cluster), 60, "at rest")
    time.sleep(1.0)
    before, expired = sockets_and_tasks(cluster), leases_expired(cluster)

    asyncio.run(drop_requests(cluster, rng, NUM_REQUESTS))
    deadline = time.monotonic() + WITHIN_S
    while (held := left_behind(cluster) | grown(before, sockets_and_tasks(cluster))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert held == {}
    assert leases_expired(cluster) == expired, "blocks came back only because nobody had fetched them for too long"
    answer = cluster.client().completions.create(model=cluster.model, prompt="hello", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 1


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in after.items() if value > before[name]}


async def drop_requests(cluster: Cluster, rng: random.Random, count: int) -> None:
    model = cluster.model
    seats = asyncio.Semaphore(CONCURRENCY)

    async def one() -> None:
        body = {
            "model": model,
            "prompt": [rng.randrange(50, 49_000) for _ in range(rng.choice((5, 40, 200, 700)))],
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": rng.random() < 0.7,
        }
        async with seats, httpx.AsyncClient(base_url=cluster.url, timeout=60, verify=NO_TLS) as client:
            try:
                async with asyncio.timeout(rng.uniform(0.0, 1.5)):
                    async with client.stream("POST", "/v1/completions", json=body) as response:
                        async for _ in response.aiter_lines():
                            pass
            except TimeoutError:
                pass

    await asyncio.gather(*(one() for _ in range(count)))


def test_requests_dropped_in_the_queue_never_reach_a_node(cluster: Cluster) -> None:
    """Clients that leave while their requests wait for a seat must cost no prefill."""
    prefill: list[Service] = cluster.prefill

    async def in_flight(least: int, most: int) -> None:
        """At the router, of whose HTTP half and queue they are then a part, or no more."""

        def are_so_many() -> bool:
            return least <= cluster.router.metrics()["kvasir:router_requests_in_flight"] <= most

        await asyncio.to_thread(wait_until, are_so_many, 60, "in flight")

    async def run() -> None:
        model = cluster.model
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:

            def ask(token: int, length: int) -> "asyncio.Task[httpx.Response]":
                body = {"model": model, "prompt": [token] * length, "max_tokens": 8, "ignore_eos": True}
                return asyncio.create_task(client.post("/v1/completions", json=body))

            long = [ask(9 + i, 2000) for i in range(4)]
            await in_flight(4, 4)
            leaving = [ask(99 + i, 400) for i in range(5)]
            await in_flight(9, 9)
            for one in leaving:
                one.cancel()
            await in_flight(0, 4)
            responses = await asyncio.gather(*long)
            assert [response.status_code for response in responses] == [200] * 4
            await in_flight(0, 0)

    with cluster.deltas(prefill, "kvasir:requests_started_total") as rose:
        asyncio.run(run())
    assert rose["kvasir:requests_started_total"] == 4
