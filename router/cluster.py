"""The dispatching half, put together: started in order, stopped in reverse."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvasir.common.metrics import Metrics
from kvasir.router.canary import Canary
from kvasir.router.config import RouterConfig
from kvasir.router.costs import LocalPrefill
from kvasir.router.dispatch import Dispatcher
from kvasir.router.dispatch_metrics import DispatchMetrics, watch_pool
from kvasir.router.nodes import Role
from kvasir.router.pace import Pace
from kvasir.router.policy import POLICIES, Rules
from kvasir.router.pool import NodePool
from kvasir.router.queue import AdmissionQueue
from kvasir.router.registry import Registry, RegistryServicer, registry_server
from kvasir.router.session import SessionSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    dispatcher: Dispatcher
    pool: NodePool
    queue: AdmissionQueue
    canary: Canary
    registry: Registry
    registry_port: int  # 0: nodes announce themselves elsewhere


@asynccontextmanager
async def running_cluster(
    config: RouterConfig, secret: str | None, metrics: Metrics, *, listens: bool = True
) -> AsyncIterator[Cluster]:
    """Nodes may join from now on; requests may come at once and wait for them. `listens`: for nodes that announce
    themselves."""
    recorders = DispatchMetrics(metrics)
    pool = NodePool()
    queue = AdmissionQueue(
        pool,
        Rules(POLICIES[config.policy], LocalPrefill(config.max_local_prefill_tokens, config.max_local_prompt_tokens)),
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        node_wait_s=config.node_wait_s,
        num_sharing=config.workers,
        priority_aging_s=config.priority_aging_s,
    )
    dispatcher = Dispatcher(
        pool,
        queue,
        recorders,
        request_timeout_s=config.request_timeout_s,
        max_attempts=config.max_attempts,
        node_wait_s=config.node_wait_s,
    )
    pace = Pace(config.max_token_wait_s)
    settings = SessionSettings(
        pace=pace, heartbeat_timeout_s=config.heartbeat_timeout_s, engine_age_limit_s=config.engine_age_limit_s
    )
    registry = Registry(pool, recorders, settings, secret)
    canary = Canary(dispatcher, pool, recorders, config.canary_timeout_s)
    watch_pool(metrics, pool, lambda: queue.num_waiting, lambda: dispatcher.num_in_flight - queue.num_waiting)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        await stack.enter_async_context(_background(queue.run()))
        await stack.enter_async_context(_background(pace.run()))
        await stack.enter_async_context(_background(canary.run()))
        port = 0
        if listens:
            server = registry_server(RegistryServicer(registry), config.grpc_listen, secret)
            port = await stack.enter_async_context(server)
        for role, addresses in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for address in addresses:
                registry.dial_forever(address, role)
        yield Cluster(dispatcher, pool, queue, canary, registry, port)


@asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(_report_end)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a task of the router has died", exc_info=task.exception())
