"""Who belongs to the cluster: nodes that announce themselves, and those of a static list.

Either way the router dials the node, checks that it may pair with those that are here, and uses it until the session
ends. A node that announced itself is then gone until it announces itself again; one of the list is dialled again.

The name of a host is looked up once for each time that it is dialled: what a node says of itself and its session come
from the same place. An address is one node: of several that share a name, the others are not used.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from kvasir.common.addresses import join_address, split_address
from kvasir.common.errors import NodeUnavailable
from kvasir.common.grpc_client import open_channel
from kvasir.common.grpc_server import bind, new_server
from kvasir.common.logging import Sparse
from kvasir.proto import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from kvasir.router import wire
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.nodes import NodeInfo, Role
from kvasir.router.pool import NodePool
from kvasir.router.prefix_index import HeldBlocks
from kvasir.router.session import NodeSession, SessionSettings

log = logging.getLogger(__name__)

ANNOUNCE_AGAIN_S = 2.0
_REDIAL_FIRST_S = 0.1
_REDIAL_AT_LEAST_EVERY_S = 2.0
_MAX_LOOKUPS = 32  # at once
_NOBODY_IS_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def node_stub(role: Role, channel: grpc.aio.Channel) -> Any:
    """Both services have the same three methods."""
    stub = prefill_pb2_grpc.PrefillServiceStub if role is Role.PREFILL else decode_pb2_grpc.DecodeServiceStub
    return stub(channel)


class Registry:
    """All memberships; each is a task that dials one address."""

    def __init__(self, pool: NodePool, metrics: DispatchMetrics, settings: SessionSettings, secret: str | None) -> None:
        self._pool = pool
        self._metrics = metrics
        self._settings = settings
        self._secret = secret
        self._static: dict[str, asyncio.Task[None]] = {}
        self._announced: dict[str, asyncio.Task[bool]] = {}
        self._epochs: dict[str, str] = {}
        self._replaced: dict[str, set[str]] = {}  # epochs, by address: those whose place another one has taken
        self._sparse = Sparse()
        self._troubles: dict[str, str] = {}  # why an address could not join at the last try
        # Of their own: a name server that does not answer keeps whoever asks, and nothing else, waiting.
        self._lookups = ThreadPoolExecutor(_MAX_LOOKUPS, thread_name_prefix="lookup")

    def dial_forever(self, address: str, role: Role) -> None:
        """A node of the static list."""
        self._static[address] = asyncio.create_task(self._keep_dialling(address, role))

    def announced(self, info: NodeInfo) -> str:
        """Why it will not be used; empty if it will. Repeated announcements of a member change nothing."""
        refusal = self._pool.refusal(info)
        if refusal:
            return refusal
        address = info.address
        trouble = self._troubles.get(address, "")
        if address in self._static:
            return trouble
        task = self._announced.get(address)
        if task is not None and not task.done():
            if self._epochs[address] == info.epoch:
                return trouble
            if info.epoch in self._replaced[address]:
                return self._clash(address)
            self._replaced[address].add(self._epochs[address])
            task.cancel()  # that process is dead, whether we have noticed or not
        else:
            self._replaced[address] = set()
        self._epochs[address] = info.epoch
        self._announced[address] = asyncio.create_task(self._serve_once(address, info.role))
        return trouble

    def _clash(self, address: str) -> str:
        """Of one that was taken for dead: two that went on to take each other's place would serve nobody."""
        why = f"another node announces itself as {address}, too: each wants an --advertise-host, or a port, of its own"
        if self._sparse.allows(address):
            log.warning("two nodes take each other's place: %s", why)
        return why

    def withdrawn(self, address: str, epoch: str) -> None:
        """It takes nothing new; its session ends when it is done."""
        node = self._pool.get(address)
        if node is not None and node.info.epoch == epoch:
            node.drain()

    async def close(self) -> None:
        tasks = [*self._static.values(), *self._announced.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _keep_dialling(self, address: str, role: Role) -> None:
        delay_s = _REDIAL_FIRST_S
        while True:
            has_joined = await self._serve_once(address, role)
            delay_s = _REDIAL_FIRST_S if has_joined else min(2 * delay_s, _REDIAL_AT_LEAST_EVERY_S)
            await asyncio.sleep(delay_s)

    async def _serve_once(self, address: str, role: Role) -> bool:
        """Use the node until its session ends. True if it joined at all."""
        has_joined = False
        try:
            async with self._member(address, role) as session:
                has_joined = True
                self._troubles.pop(address, None)
                log.warning("lost %s node %s: %s", role.value, address, await session.lost())
        except (NodeUnavailable, grpc.aio.AioRpcError) as error:
            why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
            if self._troubles.get(address) != why:
                log.warning("cannot use %s node %s: %s", role.value, address, why)
            self._troubles[address] = why
        return has_joined

    @asynccontextmanager
    async def _member(self, address: str, role: Role) -> AsyncIterator[NodeSession]:
        """In the pool for as long as this lasts."""
        place, info = await self._describe(address, role)
        session = NodeSession(info, self._secret, self._settings, place)
        ask_snapshot = lambda: session.send(wire.request_kv_snapshot(role))  # noqa: E731
        held = HeldBlocks(info.kv_identity, info.block_size, info.num_total_blocks, ask_snapshot)
        session.on_kv_events = held.apply
        try:
            node = self._pool.add(info, session, await session.open(), held)
            session.on_heartbeat = lambda load, draining: node.report(load, is_draining=draining)
            session.on_lost = lambda: self._pool.remove(node)  # before its requests look for another
            self._metrics.nodes_joined(role=role.value)
            log.info("%s node %s joined (%s)", role.value, address, info.model_name)
            try:
                yield session
            finally:
                self._pool.remove(node)
                self._metrics.nodes_lost(role=role.value)
        finally:
            await session.close()

    async def _describe(self, address: str, role: Role) -> tuple[str, NodeInfo]:
        """Where it is, as a number, and what it says of itself."""
        places = await asyncio.get_running_loop().run_in_executor(self._lookups, places_of, address)
        answers = await asyncio.gather(*(self._ask(place, role) for place in places), return_exceptions=True)
        found = [(place, one) for place, one in zip(places, answers, strict=True) if not isinstance(one, BaseException)]
        if not found:
            raise _most_telling([error for error in answers if isinstance(error, BaseException)])
        place, description = found[0]
        if len({one.node_epoch for _, one in found}) > 1:
            log.warning("%s stands for several nodes, of which %s is used: list each, or let them join", address, place)
        try:
            info = wire.node_from_proto(address, description)
        except ValueError as error:
            raise NodeUnavailable(f"cannot read what {address} says of itself: {error}") from error
        if info.role is not role:
            raise NodeUnavailable(f"{address} is a {info.role.value} node, not a {role.value} node")
        if refusal := self._pool.refusal(info):
            raise NodeUnavailable(refusal)
        return place, info

    async def _ask(self, place: str, role: Role) -> common_pb2.NodeDescription:
        request, timeout_s = common_pb2.DescribeRequest(), self._settings.open_timeout_s
        async with open_channel(place, self._secret) as channel:
            answer = await node_stub(role, channel).Describe(request, timeout=timeout_s)
        description: common_pb2.NodeDescription = answer.node
        return description


def places_of(address: str) -> list[str]:
    """What a host's name stands for now, in the system's order: `node:50051` -> 10.0.0.7:50051, 10.0.0.8:50051"""
    try:
        host, port = split_address(address)
        ends = [end for *_, end in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        hosts = [socket.getnameinfo(end, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0] for end in ends]
    except (OSError, ValueError) as error:
        raise NodeUnavailable(f"{address} cannot be looked up: {error}") from error
    return [join_address(one, port) for one in dict.fromkeys(hosts)]


def _most_telling(errors: list[BaseException]) -> BaseException:
    """What somebody answered, sooner than that nobody did: `localhost` is often ::1 too, where no node listens."""
    return min(errors, key=lambda error: isinstance(error, grpc.aio.AioRpcError) and error.code() in _NOBODY_IS_THERE)


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Announce(
        self,
        request: registry_pb2.AnnounceRequest,
        context: grpc.aio.ServicerContext[registry_pb2.AnnounceRequest, registry_pb2.AnnounceResponse],
    ) -> registry_pb2.AnnounceResponse:
        try:
            info = wire.node_from_proto(request.address, request.node)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        refusal = self._registry.announced(info)
        return registry_pb2.AnnounceResponse(refused_because=refusal, announce_again_s=ANNOUNCE_AGAIN_S)

    async def Withdraw(
        self,
        request: registry_pb2.WithdrawRequest,
        context: grpc.aio.ServicerContext[registry_pb2.WithdrawRequest, registry_pb2.WithdrawResponse],
    ) -> registry_pb2.WithdrawResponse:
        self._registry.withdrawn(request.address, request.node_epoch)
        return registry_pb2.WithdrawResponse()


@asynccontextmanager
async def registry_server(
    servicer: registry_pb2_grpc.RegistryServiceServicer, listen: str, secret: str | None
) -> AsyncIterator[int]:
    """Where nodes announce themselves; yields the port."""
    server = new_server(listen, secret)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = bind(server, listen)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=None)
