"""Blocks from one node's memory to another's over ZeroMQ: the receiver asks, the sender lends without copying."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import zmq

from kvasir.common.addresses import join_address
from kvasir.common.errors import KVTransferError
from kvasir.common.secrets import is_loopback
from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, Ticket
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.tcp.back_off import BackOff
from kvasir.kv_connector.tcp.link import Link
from kvasir.kv_connector.tcp.requests import Requests
from kvasir.kv_connector.tcp.server import TcpServer

_MIN_WINDOW, _MAX_WINDOW = 2, 128


class TcpConnector:
    name = "tcp"
    is_store: Literal[False] = False

    def __init__(self, settings: ConnectorSettings) -> None:
        if not settings.secret and not is_loopback(settings.listen_host):
            raise ValueError(f"listening on {settings.listen_host} needs the cluster's secret")
        self._settings = settings
        self._context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        self._keys = protocol.keys_of(settings.secret)
        self._encryption = settings.encryption
        self._back_off = BackOff(time.monotonic)
        self._server: TcpServer | None = None
        self._port = 0
        self._max_payload_bytes = 0
        self._links: dict[str, tuple[Link, asyncio.Task[None]]] = {}

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        server = TcpServer(self._context, source, max_payload_bytes, self._keys, self._encryption)
        self._port = server.bind(self._settings.listen_host, self._settings.listen_port)
        self._server = server

    async def close(self) -> None:
        for link, connecting in self._links.values():
            connecting.cancel()
            link.close("this node closes")
        if self._server is not None:
            await self._server.close()
        self._context.destroy(linger=0)

    @property
    def endpoint(self) -> str:
        host = self._settings.advertise_host or self._settings.listen_host
        return join_address(host, self._port)

    async def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        if not ticket.endpoints:
            raise KVTransferError(f"ticket {ticket.transfer_id} names no endpoint")
        requests = Requests(await self._link(ticket.endpoints[0].address), ticket.transfer_id)
        num_asked = 0
        try:
            while num_asked < len(keys) or len(requests):
                if num_asked < len(keys):
                    num_asked += await requests.ask(keys[num_asked : num_asked + protocol.MAX_KEYS_A_REQUEST])
                if len(requests):
                    yield await requests.next()
        finally:
            requests.close()

    async def release(self, ticket: Ticket) -> None:
        await self._say(ticket, protocol.RELEASE)

    async def keep_alive(self, ticket: Ticket) -> None:
        await self._say(ticket, protocol.KEEP_ALIVE)

    async def _say(self, ticket: Ticket, word: bytes) -> None:
        """Tell every endpoint of the ticket, but those whose link is lost."""
        for endpoint in ticket.endpoints:
            known = self._links.get(endpoint.address)
            if known is None or not known[0].why_lost:
                (await self._link(endpoint.address)).say(word + ticket.transfer_id.encode())

    async def _link(self, address: str) -> Link:
        """The link that all transfers from this sender share; a new one if there is none or it is lost."""
        if address not in self._links or self._links[address][0].why_lost:
            self._close_lost_links()
            self._back_off.check(address)
            link = Link(self._context, address, self._max_payload_bytes, self._window, self._keys, self._encryption)
            connecting = asyncio.create_task(self._connect(link, address))
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs it
            self._links[address] = link, connecting
        link, connecting = self._links[address]
        await asyncio.shield(connecting)
        return link

    async def _connect(self, link: Link, address: str) -> None:
        try:
            await link.connect()
        except KVTransferError as error:
            self._back_off.failed(address, error)
            raise
        self._back_off.worked(address)

    @property
    def _window(self) -> int:
        """How many blocks one link may have on their way."""
        return min(max(self._settings.window_bytes // self._max_payload_bytes, _MIN_WINDOW), _MAX_WINDOW)

    def _close_lost_links(self) -> None:
        for address, (link, _) in list(self._links.items()):
            if link.why_lost:
                link.close("lost")
                del self._links[address]
