"""A router of several processes: the parent accepts connections, keeps what there is one of, and keeps workers alive.

clients --> parent (door) --connections--> workers --sessions--> nodes
nodes   --> parent (roster) --announcements--> workers
            parent (hub) <--limits, stored responses, sums-- workers
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from kvasir.common.secrets import cluster_secret
from kvasir.proto import workers_pb2_grpc
from kvasir.router.config import RouterConfig
from kvasir.router.http_server import bound_socket
from kvasir.router.nodes import Role
from kvasir.router.openai.responses.store import MemoryResponseStore
from kvasir.router.registry import registry_server
from kvasir.router.server import StopSignals
from kvasir.router.workers.door import Door
from kvasir.router.workers.folder import own_folder
from kvasir.router.workers.hub import Hub
from kvasir.router.workers.places import Places, server_at
from kvasir.router.workers.process import WorkerProcess
from kvasir.router.workers.roster import Roster

log = logging.getLogger(__name__)

_REFRESH_EVERY_S = 1.0
_SILENT_FOR_S = 30.0  # a worker that says nothing for so long is killed
_KILL_AFTER_S = 10.0  # the grace time is over, and a worker is still there
_LONG_ENOUGH_S = 60.0  # a worker that lived so long is started again at once
_LONGEST_DELAY_S = 30.0
_KNOWS_NODES_WITHIN_S = 10.0


async def serve_workers(config: RouterConfig) -> int:
    """Until a signal comes; the exit status. A worker that cannot start at first is a failure, and says why itself."""
    stop = StopSignals()
    secret = cluster_secret(os.environ, None if config.cluster_secret_file is None else str(config.cluster_secret_file))
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bound_socket(config.host, config.port))
        port = listener.getsockname()[1]
        folder = stack.enter_context(own_folder())
        share = share_of(config.model_copy(update={"port": port})).model_dump_json().encode()
        workers = [WorkerProcess(number, Places(folder), share) for number in range(config.workers)]
        hub = Hub(
            workers, MemoryResponseStore(ttl_s=config.response_store_ttl_s, max_bytes=config.response_store_bytes)
        )
        roster = Roster(workers, secret)
        stack.push_async_callback(roster.close)
        await stack.enter_async_context(_hub_server(hub, Places(folder).hub()))
        await stack.enter_async_context(registry_server(roster, config.grpc_listen, secret))
        for role, addresses in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            for address in addresses:
                roster.ask_forever(address, role)
        crew = Crew(workers, hub, roster)
        try:
            if not await crew.start(stop.first):
                return 0 if stop.first.is_set() else 1
            door = Door(listener, crew.hand)
            door.open()
            log.info("%d workers are serving on http://%s:%d", config.workers, config.host, port)
            await stop.first.wait()
            door.close()
            stop.on_second = lambda: crew.send(signal.SIGTERM)
            log.info("stopping: requests that run may end within %g s", config.shutdown_grace_s)
        finally:
            await crew.stop(config.shutdown_grace_s)
    log.info("stopped")
    return 0


def share_of(config: RouterConfig) -> RouterConfig:
    """One worker's. Limits of the whole router are divided, rounded up; nodes are announced by the parent."""

    def part(number: int | None) -> int | None:
        return None if number is None else -(-number // config.workers)

    divided = (
        "limit_concurrency",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_resumable_streams",
        "max_resumable_streams_per_key",
        "streams_redis_bytes",
        "grammar_workers",
    )
    return config.model_copy(
        update={"prefill": [], "decode": [], **{name: part(getattr(config, name)) for name in divided}}
    )


class Crew:
    """All workers: started, started again when they die, stopped."""

    def __init__(self, workers: Sequence[WorkerProcess], hub: Hub, roster: Roster) -> None:
        self._workers = workers
        self._hub = hub
        self._roster = roster
        self._turn = 0
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self, stopped: asyncio.Event) -> bool:
        """False if a worker ends, or we are stopped. The first alone: what is wrong with it is wrong with all."""
        stopping = asyncio.create_task(stopped.wait())
        try:
            for workers in (self._workers[:1], self._workers[1:]):
                starting = asyncio.gather(*(self._start(worker) for worker in workers))
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if not starting.done() or not all(starting.result()):
                    starting.cancel()
                    return False
        finally:
            stopping.cancel()
        self._keeping = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        self._keeping.append(asyncio.create_task(self._refresh()))
        return True

    def hand(self, connection: socket.socket) -> bool:
        """To each worker in turn."""
        for _ in self._workers:
            self._turn = (self._turn + 1) % len(self._workers)
            if self._workers[self._turn].take(connection):
                return True
        return False

    def send(self, number: signal.Signals) -> None:
        for worker in self._workers:
            worker.send(number)

    async def stop(self, grace_s: float) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self.send(signal.SIGTERM)
        ending = [asyncio.create_task(worker.wait()) for worker in self._workers if worker.started_s]
        if ending:
            await asyncio.wait(ending, timeout=grace_s + _KILL_AFTER_S)
            self.send(signal.SIGKILL)
            await asyncio.gather(*ending)

    async def _start(self, worker: WorkerProcess, *, takes_over: bool = False) -> bool:
        """False if it ends before it is up. While others serve (`takes_over`), it is given no connection before it
        knows the nodes that they know, or has had the time to."""
        await worker.start()
        if not await worker.wait_until_up():
            return False
        if await self._roster.introduce(worker) and takes_over:
            await worker.wait_until_ready(_KNOWS_NODES_WITHIN_S)
        worker.is_up = worker.is_running
        return worker.is_up

    async def _keep(self, worker: WorkerProcess) -> None:
        num_deaths = 0
        while True:
            status = await worker.wait()
            await self._hub.died(worker)
            has_lived = time.monotonic() - worker.started_s > _LONG_ENOUGH_S
            num_deaths = 0 if has_lived else num_deaths + 1
            delay_s = 0.0 if num_deaths <= 1 else min(_LONGEST_DELAY_S, 0.5 * 2 ** min(num_deaths, 10))
            log.error("worker %d ended (status %d); starting it again in %g s", worker.number, status, delay_s)
            await asyncio.sleep(delay_s)
            try:
                if await self._start(worker, takes_over=True):
                    log.info("worker %d is up again", worker.number)
            except OSError as error:
                log.error("cannot start worker %d: %s", worker.number, error)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_EVERY_S)
            await self._hub.refresh()
            for worker in self._workers:
                if worker.is_up and time.monotonic() - worker.heard_s > _SILENT_FOR_S:
                    log.error("worker %d has said nothing for %g s", worker.number, _SILENT_FOR_S)
                    worker.send(signal.SIGKILL)


@asynccontextmanager
async def _hub_server(hub: Hub, place: str) -> AsyncIterator[None]:
    server = server_at(place)
    workers_pb2_grpc.add_WorkersHubServiceServicer_to_server(hub, server)  # type: ignore[no-untyped-call]
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=None)
