"""What nixl and mooncake have in common: the receiver's engine reads blocks straight out of the sender's memory.

The sender's Python takes no part in moving a payload. Over a small connection of their own (`protocol.py`), the sender
lends blocks for a time that both sides know, and sends their headers. The receiver's engine reads the payloads into a
staging buffer; then the receiver says that it is done. The core checks what was staged and copies it into the cache,
as it does with frames of any connector, so a read that completes too late never writes to a block of the cache.

A read that has begun cannot be called back. So the loan ends by time: a receiver discards what it has not read within
it, and the sender gets its blocks back at its end even if the receiver never answers.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Literal, TypeVar

from kvasir.common.errors import KVTransferError
from kvasir.common.secrets import is_loopback
from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, Ticket
from kvasir.kv_connector.links import Links
from kvasir.kv_connector.one_sided import protocol
from kvasir.kv_connector.one_sided.engine import Pool, ReadEngine
from kvasir.kv_connector.one_sided.link import Link
from kvasir.kv_connector.one_sided.server import LoanServer
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.threads import Job, Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

_ENGINE_TIMEOUT_S = 20.0  # to start and to stop a third party's engine
_CLOSE_TIMEOUT_S = 1.0


class OneSidedConnector:
    """A subclass sets `name`, and makes its engine in `__init__`."""

    name: str
    is_store: Literal[False] = False

    def __init__(self, settings: ConnectorSettings, engine: ReadEngine) -> None:
        if not settings.secret and not is_loopback(settings.listen_host):
            raise ValueError(f"listening on {settings.listen_host} needs the cluster's secret")
        if settings.encryption:
            raise ValueError(f"{self.name} does not encrypt; tcp does")
        self._settings = settings
        self._engine = engine
        self._server: LoanServer | None = None
        self._port = 0
        self._max_payload_bytes = 0
        self._links = Links(self._new_link)

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        pool = None if source.pool is None else Pool.of(source.pool)
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                description = await self._call_engine(lambda: self._engine.open(pool))
        except TimeoutError:
            raise KVTransferError(f"{self.name}'s engine does not start") from None
        self._server = LoanServer(source, pool, description, self._settings, self._engine.lending)
        self._port = await self._server.start()

    async def close(self) -> None:
        self._links.close()
        if self._server is not None:
            await self._server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._links.ended()
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                await self._call_engine(self._engine.close)
        except TimeoutError:
            log.error("%s's engine does not end", self.name)
        if self._server is not None:
            self._server.take_all_back()

    async def _call_engine(self, call: Callable[[], T]) -> T:
        """Call it on a thread that does not keep the process from ending if the engine hangs."""
        thread = Threads(1, f"kv-{self.name}")
        job: Job[T] = thread.start(lambda job: call())
        thread.stop()
        return await job.outcome()

    @property
    def endpoint(self) -> str:
        return self._settings.endpoint(self._port)

    async def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        link = await self._links.of(ticket)
        async with aclosing(link.fetch(ticket.transfer_id, keys)) as frames:
            async for item in frames:
                yield item

    async def release(self, ticket: Ticket) -> None:
        await self._links.say(ticket, protocol.RELEASE)

    async def keep_alive(self, ticket: Ticket) -> None:
        await self._links.say(ticket, protocol.KEEP_ALIVE)

    def _new_link(self, address: str) -> Link:
        return Link(address, self._engine, self._settings, self._max_payload_bytes)
