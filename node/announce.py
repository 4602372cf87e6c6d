"""Tells routers that this node is here: again every few seconds, and once that it leaves.

A router that is not there yet, or no longer, is tried again with back-off and one line in the log.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio

from kvasir.common.addresses import split_address
from kvasir.common.grpc_client import open_channel
from kvasir.proto import common_pb2, registry_pb2, registry_pb2_grpc

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_AGAIN_S = (0.5, 30.0)  # bounds of what a router may ask for
_FIRST_RETRY_S, _LAST_RETRY_S = 0.2, 3.0

_make_stub: Any = registry_pb2_grpc.RegistryServiceStub  # generated code has no types


def own_address(listen_host: str, routers: Sequence[str]) -> str:
    """Where others reach a server on `listen_host`: itself, or on all interfaces, the one towards the first router."""
    if listen_host not in ("0.0.0.0", "::"):
        return listen_host
    if not routers:
        return socket.gethostname()
    host, port = split_address(routers[0])
    family = socket.AF_INET6 if listen_host == "::" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect((host, port or 1))
            return str(probe.getsockname()[0])
    except OSError:  # the router's name does not resolve (yet)
        return socket.gethostname()


class Announcer:
    """`start` once the node serves; `close` withdraws it from all routers."""

    def __init__(
        self, routers: Sequence[str], address: str, node: common_pb2.NodeDescription, secret: str | None
    ) -> None:
        self._routers = routers
        self._address = address
        self._node = node
        self._secret = secret
        self._tasks: list[asyncio.Task[None]] = []
        self._channels = AsyncExitStack()
        self._stubs: list[Any] = []

    async def start(self) -> None:
        for router in self._routers:
            channel = await self._channels.enter_async_context(open_channel(router, self._secret))
            stub = _make_stub(channel)
            self._stubs.append(stub)
            self._tasks.append(asyncio.create_task(self._announce_for_ever(router, stub)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        request = registry_pb2.WithdrawRequest(address=self._address, node_epoch=self._node.node_epoch)
        calls = [stub.Withdraw(request, timeout=_TIMEOUT_S) for stub in self._stubs]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, grpc.aio.AioRpcError):
                log.debug("could not withdraw: %s: %s", outcome.code().name, outcome.details())
        await self._channels.aclose()

    async def _announce_for_ever(self, router: str, stub: Any) -> None:
        said = ""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                request = registry_pb2.AnnounceRequest(address=self._address, node=self._node)
                answer = await stub.Announce(request, timeout=_TIMEOUT_S)
                says, pause_s = answer.refused_because, min(max(answer.announce_again_s, _AGAIN_S[0]), _AGAIN_S[1])
                retry_s = _FIRST_RETRY_S
            except grpc.aio.AioRpcError as error:
                says, pause_s = f"{error.code().name}: {error.details()}", retry_s
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            if says and says != said:
                log.warning("router %s does not take this node: %s", router, says)
            elif said and not says:
                log.info("router %s takes this node", router)
            said = says
            await asyncio.sleep(pause_s)
