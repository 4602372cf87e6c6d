"""The receiving half of a node: wanted blocks are fetched as they are published, verified, and put in their place."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from kvasir.common.errors import KVTransferError
from kvasir.engine.types import KVLayout
from kvasir.kv_connector.base import (
    BlockKey,
    BlockMemory,
    Frame,
    KVConnector,
    PeerConnector,
    StoreConnector,
    Ticket,
)
from kvasir.kv_connector.header import store_key
from kvasir.kv_connector.incoming import IncomingTransfer, ReceiverParts, WantedBlock
from kvasir.kv_connector.metrics import MissReason, TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.store_guard import StoreGuard

log = logging.getLogger(__name__)


class KVReceiver:
    def __init__(
        self,
        connector: KVConnector,
        memory: BlockMemory,
        kv_identity: bytes,
        settings: ConnectorSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: TransferMetrics | None = None,
    ) -> None:
        self.metrics = metrics or TransferMetrics()
        self._connector = connector
        self._settings = settings
        self._guard = StoreGuard(f"reading from {connector.name}", settings.store_backoff_s, clock, self.metrics)
        self._parts = ReceiverParts(memory, kv_identity, settings, clock, self.metrics)
        self._transfers: set[IncomingTransfer] = set()

    async def close(self) -> None:
        """Cancel what is under way. To be called before the sender's `close`."""
        transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            await transfer.done()

    def start(self, ticket: Ticket, wanted: Sequence[WantedBlock], on_block: Callable[[int], None]) -> IncomingTransfer:
        """Fetch these blocks of a ticket, each when `IncomingTransfer.progress` has said that it is published."""
        if self._connector.is_store:
            return self._track(IncomingTransfer(self._parts, self._from_store(self._connector), wanted, on_block))
        return self._track(IncomingTransfer(self._parts, FromPeer(self._connector, ticket), wanted, on_block))

    def fetch_stored(self, wanted: Sequence[WantedBlock], on_block: Callable[[int], None]) -> IncomingTransfer:
        """Fetch blocks that a store was seen to have, without a ticket."""
        if not self._connector.is_store:
            raise ValueError(f"{self._connector.name} is no store: its blocks need a ticket")
        transfer = IncomingTransfer(self._parts, self._from_store(self._connector), wanted, on_block)
        transfer.progress(max((block.index + 1 for block in wanted), default=0), committed=True)
        return self._track(transfer)

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many of the leading keys a store has; 0 where there is none, or where it does not answer."""
        if not (self._connector.is_store and keys and self._guard.is_open):
            return 0
        try:
            with self._guard.attempt():
                async with asyncio.timeout(self._settings.lookup_timeout_s):
                    found = await self._connector.contains([store_key(key, self._parts.layout) for key in keys])
        except KVTransferError:
            return 0
        return found.index(False) if False in found else len(found)

    def _from_store(self, store: StoreConnector) -> "FromStore":
        return FromStore(store, self._guard, self._parts.layout)

    def _track(self, transfer: IncomingTransfer) -> IncomingTransfer:
        self._transfers.add(transfer)
        transfer.on_done(self._transfers.discard)
        return transfer


class FromPeer:
    """A ticket's blocks, out of the memory of the node that computed them."""

    lost = MissReason.PEER_LOST
    has_one_epoch = True

    def __init__(self, connector: PeerConnector, ticket: Ticket) -> None:
        self._connector = connector
        self._ticket = ticket

    async def fetch(self, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
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
        log.warning("transfer %s: %s", self._ticket.transfer_id, error)


class FromStore:
    """Blocks by content, from whoever stored them."""

    lost = MissReason.STORE_DOWN
    has_one_epoch = False

    def __init__(self, store: StoreConnector, guard: StoreGuard, layout: KVLayout) -> None:
        self._store = store
        self._guard = guard
        self._layout = layout

    async def fetch(self, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        names = {store_key(key, self._layout): key for key in keys}
        with self._guard.attempt():
            async with aclosing(self._store.fetch(list(names))) as frames:
                async for name, frame in frames:
                    yield names[name], frame

    async def keep_alive(self) -> None:
        """What is stored needs no lease."""

    async def finish(self, unusable: Sequence[BlockKey]) -> None:
        if unusable:
            with self._guard.attempt():
                await self._store.discard([store_key(key, self._layout) for key in unusable])

    def timed_out(self) -> None:
        self._guard.failed("blocks did not come in time")

    def failed(self, error: KVTransferError) -> None:
        """The guard has counted it, and says it once."""
