"""Blocks from one node's memory to another's over ZeroMQ: the receiver asks, the sender lends without copying."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

import zmq

from kvasir.common.secrets import is_loopback
from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, Ticket
from kvasir.kv_connector.links import Links
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
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
        self._server: TcpServer | None = None
        self._port = 0
        self._max_payload_bytes = 0
        self._links = Links(self._new_link)

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        server = TcpServer(self._context, source, max_payload_bytes, self._keys, self._encryption)
        self._port = server.bind(self._settings.listen_host, self._settings.listen_port)
        self._server = server

    async def close(self) -> None:
        self._links.close()
        if self._server is not None:
            await self._server.close()
        self._context.destroy(linger=0)

    @property
    def endpoint(self) -> str:
        return self._settings.endpoint(self._port)

    async def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        requests = Requests(await self._links.of(ticket), ticket.transfer_id)
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
        await self._links.say(ticket, protocol.RELEASE)

    async def keep_alive(self, ticket: Ticket) -> None:
        await self._links.say(ticket, protocol.KEEP_ALIVE)

    def _new_link(self, address: str) -> Link:
        most = self._max_payload_bytes
        window = min(max(self._settings.window_bytes // most, _MIN_WINDOW), _MAX_WINDOW)
        return Link(self._context, address, most, window, self._keys, self._encryption)
