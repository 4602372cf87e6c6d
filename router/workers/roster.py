"""The parent's registry: it knows which nodes are there, and tells all workers, who dial them.

It decides alone who may pair with whom, so that no two workers can decide otherwise. A node that announces itself is
there until it has not done so three times; one of the static list is asked to describe itself instead.
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kvasir.common.grpc_client import open_channel
from kvasir.proto import common_pb2, registry_pb2, registry_pb2_grpc
from kvasir.router import wire
from kvasir.router.nodes import NodeInfo, Role, pairing_refusal
from kvasir.router.registry import ANNOUNCE_AGAIN_S, node_stub
from kvasir.router.workers.process import WorkerProcess

log = logging.getLogger(__name__)

_GONE_AFTER_S = 3 * ANNOUNCE_AGAIN_S
_ASK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Member:
    info: NodeInfo
    request: registry_pb2.AnnounceRequest
    until_s: float


class Roster(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, workers: Sequence[WorkerProcess], secret: str | None) -> None:
        self._workers = workers
        self._secret = secret
        self._members: dict[str, _Member] = {}
        self._asking: list[asyncio.Task[None]] = []

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: Any) -> registry_pb2.AnnounceResponse:
        return registry_pb2.AnnounceResponse(
            refused_because=await self._announced(request), announce_again_s=ANNOUNCE_AGAIN_S
        )

    async def Withdraw(self, request: registry_pb2.WithdrawRequest, context: Any) -> registry_pb2.WithdrawResponse:
        member = self._members.get(request.address)
        if member is not None and member.info.epoch == request.node_epoch:
            del self._members[request.address]
        await asyncio.gather(*(worker.withdraw(request) for worker in self._workers if worker.is_up))
        return registry_pb2.WithdrawResponse()

    async def introduce(self, worker: WorkerProcess) -> bool:
        """To one that has just come. False if nobody is there."""
        members = self._present()
        await asyncio.gather(*(worker.announce(member.request) for member in members))
        return bool(members)

    def ask_forever(self, address: str, role: Role) -> None:
        """A node of the static list."""
        self._asking.append(asyncio.create_task(self._ask(address, role)))

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _present(self) -> list[_Member]:
        now = time.monotonic()
        self._members = {address: member for address, member in self._members.items() if member.until_s > now}
        return list(self._members.values())

    async def _announced(self, request: registry_pb2.AnnounceRequest) -> str:
        """Why it is not used; empty if it is, or will be."""
        info = wire.node_from_proto(request.address, request.node)
        if refusal := pairing_refusal(info, (member.info for member in self._present())):
            return refusal
        self._members[info.address] = _Member(info, request, time.monotonic() + _GONE_AFTER_S)
        troubles = await asyncio.gather(*(worker.announce(request) for worker in self._workers if worker.is_up))
        return next(filter(None, troubles), "")

    async def _ask(self, address: str, role: Role) -> None:
        known_trouble = ""
        async with open_channel(address, self._secret) as channel:
            while True:
                trouble = await self._ask_once(channel, address, role)
                if trouble and trouble != known_trouble:
                    log.warning("cannot use %s node %s: %s", role.value, address, trouble)
                known_trouble = trouble
                await asyncio.sleep(_ASK_EVERY_S)

    async def _ask_once(self, channel: grpc.aio.Channel, address: str, role: Role) -> str:
        try:
            answer = await node_stub(role, channel).Describe(common_pb2.DescribeRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        if wire.node_from_proto(address, answer.node).role is not role:
            return f"it is not a {role.value} node"
        return await self._announced(registry_pb2.AnnounceRequest(address=address, node=answer.node))
