"""Where an incoming transfer's blocks come from: a peer by its ticket, or a store by content."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from kvasir.common.errors import KVTransferError
from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import BlockKey, Frame, PeerConnector, StoreConnector, StoreKey, Ticket
from kvasir.kv_connector.errors import OtherVersion
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.store_guard import StoreGuard
from kvasir.kv_connector.stored import store_key

log = logging.getLogger(__name__)


LandBlock = Callable[[BlockKey, Frame], None]


class Source(Protocol):
    """Where the blocks of one transfer come from, and how to report what went wrong there."""

    name: str  # for the log, and for its entry in `Rates`
    lost: MissReason  # how blocks are counted that are missing because the whole source failed
    has_one_epoch: bool  # whether all blocks of a transfer must come from one process
    form: str | None  # the only form that is accepted from a store; None: any, as a peer's headers say

    def fetch(self, keys: Sequence[BlockKey], land: LandBlock) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        """As the connectors' `fetch`. `land` is for connectors that read on threads."""
        ...

    async def keep_alive(self) -> None: ...
    async def finish(self, unusable: Sequence[BlockKey]) -> None:
        """Nothing more is wanted. `unusable` are keys whose blocks arrived damaged or wrong twice."""
        ...

    def timed_out(self) -> None:
        """Blocks did not come within their deadline."""
        ...

    def failed(self, error: KVTransferError) -> None: ...


async def keep_alive(source: Source, every_s: float) -> None:
    """Keep the lease alive, on a task of its own: also while one block takes long, or none is published for long."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await source.keep_alive()
        except KVTransferError as error:
            log.debug("%s cannot be told to wait: %s", source.name, error)  # the transfer goes on all the same
        except Exception:
            log.exception("%s cannot be told to wait, in an unforeseen way", source.name)


class FromPeer:
    """The blocks of a ticket, out of the memory of the node that computes them."""

    has_one_epoch = True
    form: str | None = None

    def __init__(self, connector: PeerConnector, ticket: Ticket) -> None:
        self.lost = MissReason.PEER_LOST
        self.name = ticket.endpoints[0].address if ticket.endpoints else "nobody"
        self._connector = connector
        self._ticket = ticket

    async def fetch(self, keys: Sequence[BlockKey], land: LandBlock) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        if self._ticket.connector != self._connector.name:
            raise KVTransferError(f"the ticket is for {self._ticket.connector}, this node has {self._connector.name}")
        async with aclosing(self._connector.fetch(self._ticket, keys)) as frames:
            async for item in frames:
                yield item

    async def keep_alive(self) -> None:
        await self._connector.keep_alive(self._ticket)

    async def finish(self, unusable: Sequence[BlockKey]) -> None:
        await self._connector.release(self._ticket)

    def timed_out(self) -> None:
        log.warning("transfer %s: blocks did not come in time", self._ticket.transfer_id)

    def failed(self, error: KVTransferError) -> None:
        self.lost = MissReason.VERSION if isinstance(error, OtherVersion) else MissReason.PEER_LOST
        log.warning("transfer %s: %s", self._ticket.transfer_id, error)


class FromStore:
    """Blocks by content hash, whichever node stored them."""

    lost = MissReason.STORE_DOWN
    has_one_epoch = False

    def __init__(self, store: StoreConnector, guard: StoreGuard, layout: KVLayout, form: str) -> None:
        self.name = store.name
        self.form: str | None = form
        self._store = store
        self._guard = guard
        self._layout = layout

    async def fetch(self, keys: Sequence[BlockKey], land: LandBlock) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        names = {store_key(key, self._layout, self.form): key for key in keys}

        def land_stored(name: StoreKey, frame: Frame) -> None:
            land(names[name], frame)

        with self._guard.attempt():
            async with aclosing(self._store.fetch(list(names), land=land_stored)) as frames:
                async for name, frame in frames:
                    yield names[name], frame

    async def keep_alive(self) -> None:
        """Nothing to do: stored blocks have no lease."""

    async def finish(self, unusable: Sequence[BlockKey]) -> None:
        if unusable:
            with self._guard.attempt():
                await self._store.discard([store_key(key, self._layout, self.form) for key in unusable])

    def timed_out(self) -> None:
        self._guard.failed("blocks did not come in time")

    def failed(self, error: KVTransferError) -> None:
        """Nothing to do: the guard has counted and logged it."""
