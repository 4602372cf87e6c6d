"""What nixl and mooncake have in common: a receiver reads blocks out of the sender's memory by itself.

The sender's Python takes no part in moving the payload. It lends blocks over a small connection beside it
(`protocol.py`), with their headers, for a time that both sides know; the receiver's engine reads them into a
staging buffer, and says that it is done. What was staged is checked and copied by the core as any other frame is, so
that a read that comes late touches no block of the cache. A read cannot be called back: a receiver throws away what it
has not read within the loan, and a sender has its blocks back at the loan's end, however silent the receiver is.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Literal, TypeVar

from kvasir.common.addresses import join_address
from kvasir.common.errors import KVTransferError
from kvasir.common.secrets import is_loopback
from kvasir.kv_connector.base import BlockKey, BlockSource, Frame, Ticket
from kvasir.kv_connector.one_sided import protocol
from kvasir.kv_connector.one_sided.engine import Pool, ReadEngine
from kvasir.kv_connector.one_sided.link import Link
from kvasir.kv_connector.one_sided.server import LoanServer
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.threads import Job, Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

_ENGINE_TIMEOUT_S = 20.0  # it starts and ends by code that is not ours
_CLOSE_TIMEOUT_S = 1.0
_LET_GO_TIMEOUT_S = 2.0
_MAX_HANGING = 8  # each holds a staging buffer


class OneSidedConnector:
    """To be subclassed with a name, and an engine made in `__init__`."""

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
        self._links: dict[str, tuple[Link, asyncio.Task[None]]] = {}
        self._hanging: set[Link] = set()  # lost in mid-read

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
        for link, connecting in self._links.values():
            connecting.cancel()
            link.close("this node closes")
        if self._server is not None:
            await self._server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.gather(*(link.ended.wait() for link, _ in self._links.values()))
        try:
            async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                await self._call_engine(self._engine.close)
        except TimeoutError:
            log.error("%s's engine does not end", self.name)
        if self._server is not None:
            self._server.take_all_back()

    async def _call_engine(self, call: Callable[[], T]) -> T:
        """On a thread that nobody waits for at the end of the process, should the engine hang."""
        thread = Threads(1, f"kv-{self.name}")
        job: Job[T] = thread.start(lambda job: call())
        thread.stop()
        return await job.outcome()

    @property
    def endpoint(self) -> str:
        host = self._settings.advertise_host or self._settings.listen_host
        return join_address(host, self._port)

    async def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        if not ticket.endpoints:
            raise KVTransferError(f"ticket {ticket.transfer_id} names no endpoint")
        link = await self._link(ticket.endpoints[0].address)
        async with aclosing(link.fetch(ticket.transfer_id, keys)) as frames:
            async for item in frames:
                yield item

    async def release(self, ticket: Ticket) -> None:
        await self._say(ticket, protocol.RELEASE)

    async def keep_alive(self, ticket: Ticket) -> None:
        await self._say(ticket, protocol.KEEP_ALIVE)

    async def _say(self, ticket: Ticket, word: bytes) -> None:
        """To everyone who holds a part of it, unless they are lost."""
        for endpoint in ticket.endpoints:
            known = self._links.get(endpoint.address)
            if known is None or not known[0].why_lost:
                (await self._link(endpoint.address)).say(word, ticket.transfer_id.encode())

    async def _link(self, address: str) -> Link:
        """A live link: the one that all transfers from there share, or a new one."""
        known = self._links.get(address)
        if known is not None and known[0].why_lost:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LET_GO_TIMEOUT_S):
                    await known[0].ended.wait()
            if self._links.get(address) is known:
                del self._links[address]
                self._hanging.add(known[0])
        if address not in self._links:
            self._check_hanging()
            link = Link(address, self._engine, self._settings, self._max_payload_bytes)
            connecting = asyncio.create_task(link.connect())
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if only by us
            self._links[address] = link, connecting
        link, connecting = self._links[address]
        await asyncio.shield(connecting)
        return link

    def _check_hanging(self) -> None:
        """Memory is bounded, however often peers are lost in mid-read."""
        self._hanging = {link for link in self._hanging if not link.ended.is_set()}
        if len(self._hanging) >= _MAX_HANGING:
            raise KVTransferError(f"reads from {_MAX_HANGING} lost peers hang; no new ones are begun")
