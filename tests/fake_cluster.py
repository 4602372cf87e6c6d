"""The dispatching half of a router over fake nodes, in one process, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvasir.common.metrics import Metrics
from kvasir.router.cluster import Cluster, running_cluster
from kvasir.router.config import RouterConfig
from kvasir.router.types import RoutedRequest, Sampling, TokenDelta
from tests.fake_engine import Fabric
from tests.fake_node import FakeNode
from tests.waiting import until

DEADLINE_S = 60.0


class FakeCluster:
    def __init__(self, cluster: Cluster, prefill: list[FakeNode], decode: list[FakeNode], metrics: Metrics) -> None:
        self.cluster = cluster
        self.dispatcher = cluster.dispatcher
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics

    @property
    def nodes(self) -> list[FakeNode]:
        return [*self.prefill, *self.decode]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def settle(self) -> None:
        """Nothing of any request is left anywhere."""
        await until(self._is_at_rest)

    def _is_at_rest(self) -> bool:
        queue, members, alive = self.cluster.queue, self.cluster.pool.nodes(), [n for n in self.nodes if n.is_alive]
        return not (
            self.dispatcher.num_in_flight
            or queue.num_waiting
            or queue.num_waiting_tokens
            or any(node.reservations or node.session.num_requests for node in members)
            or any(node.num_blocks_reserved or node.num_tokens_sent for node in members)
            or any(node.requests or node.leased for node in alive)
        )


@asynccontextmanager
async def fake_cluster(
    num_prefill: int = 1, num_decode: int = 1, config: dict[str, Any] | None = None, **behaviour: Any
) -> AsyncIterator[FakeCluster]:
    """Ready: all nodes are members, and the canary has been through them."""
    fabric = Fabric()
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        prefill = [
            await stack.enter_async_context(FakeNode("prefill", fabric, **behaviour)) for _ in range(num_prefill)
        ]
        decode = [await stack.enter_async_context(FakeNode("decode", fabric, **behaviour)) for _ in range(num_decode)]
        settings = RouterConfig(
            grpc_listen="127.0.0.1:0",
            prefill=[node.address for node in prefill],
            decode=[node.address for node in decode],
            # However busy the machine is: an event a token, and no node is lost by silence but where a test wants it.
            **{"max_token_wait_s": 0, "heartbeat_timeout_s": 60, **(config or {})},
        )
        cluster = await stack.enter_async_context(running_cluster(settings, None, metrics))
        fake = FakeCluster(cluster, prefill, decode, metrics)
        if num_decode:
            await until(lambda: len(cluster.pool.nodes()) == num_prefill + num_decode)
            await until(lambda: cluster.dispatcher.is_ready and cluster.dispatcher.canary_is_current)
            await fake.settle()
        yield fake


def a_request(num_prompt_tokens: int = 40, max_tokens: int = 12, seed: int = 7, **fields: Any) -> RoutedRequest:
    first = fields.pop("first", 1)
    stop = fields.pop("stop", ())
    return RoutedRequest(
        request_id=fields.pop("request_id", "r"),
        prompt_token_ids=tuple((first + 3 * index) % 1000 for index in range(num_prompt_tokens)),
        sampling=Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=frozenset(stop)),
        **fields,
    )


def tokens_of(deltas: Iterable[TokenDelta], sequence: int = 0) -> list[int]:
    return [token for delta in deltas if delta.sequence == sequence for token in delta.token_ids]


async def collect(deltas: AsyncIterator[TokenDelta]) -> list[TokenDelta]:
    async with asyncio.timeout(DEADLINE_S):
        return [delta async for delta in deltas]
