"""The sending half of a node: publishes computed blocks, and holds them until receivers and transport have let go.

The node hands one reference to each published block over to the sender. Whatever happens, the sender gives it back
exactly once, through `release_blocks`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockKey, BlockMemory, Frame, KVBlock, KVConnector, Ticket, TransferId
from kvasir.kv_connector.codec import max_payload_bytes
from kvasir.kv_connector.costs import RateMeter
from kvasir.kv_connector.encoder import Encoder
from kvasir.kv_connector.leases import LeasedBlock, Leases
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.outflow import Outflow
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.store_writer import StoreWriter

log = logging.getLogger(__name__)

_MAX_BLOCKS_PACKED = 64


class KVSender:
    """Implements `BlockSource`. All methods belong to the event loop on which `start` was called."""

    def __init__(
        self,
        connector: KVConnector,
        memory: BlockMemory,
        kv_identity: bytes,
        epoch: str,
        release_blocks: Callable[[Sequence[BlockId]], None],
        settings: ConnectorSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: TransferMetrics | None = None,
    ) -> None:
        self.metrics = metrics or TransferMetrics()
        self._connector = connector
        self._memory = memory
        self._release_blocks = release_blocks
        self._settings = settings
        self._max_packed_bytes = _MAX_BLOCKS_PACKED * memory.layout.bytes_per_block
        self._leases = Leases(settings.lease_s, clock)
        self._outgoing = RateMeter(memory.layout.bytes_per_block, settings.costs.forget_after_s, clock)
        self._encoder = Encoder(memory, kv_identity, epoch, settings.codec, self._outgoing)
        self._outflow = Outflow(self._outgoing, self.metrics, clock)
        self._store = (
            StoreWriter(connector, self._encoder, memory.layout, settings, self._give_back, clock, self.metrics)
            if connector.is_store
            else None
        )
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.to_thread(self._encoder.warm_up)
        await self._connector.open(self, max_payload_bytes(self._memory.layout))
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Closes the connector too. Gives back all blocks, except those that a hanging store may still be reading."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._store is not None:
            await self._store.close()
        for transfer_id in self._leases.all_transfers():
            self.abort(transfer_id)
        await self._connector.close()

    @property
    def stored_as(self) -> str:
        """The form in which this node writes blocks into a store, which receivers must ask for."""
        return self._encoder.form

    @property
    def num_leased_blocks(self) -> int:
        """Blocks held for others: leased to receivers, or being written to a store."""
        return self._leases.num_blocks + (self._store.num_blocks if self._store is not None else 0)

    @property
    def num_leases(self) -> int:
        return self._leases.num_transfers

    @property
    def num_borrowed_blocks(self) -> int:
        """Blocks that a transport is reading now."""
        return self._outflow.num_lent

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Of outgoing blocks, as last measured; None: not measured yet."""
        return self._outgoing.bandwidth_bytes_per_s

    def is_leased(self, transfer_id: TransferId) -> bool:
        return self._leases.has(transfer_id)

    async def publish(self, ticket: Ticket, blocks: Sequence[KVBlock]) -> None:
        """Take over these blocks, also if this raises. Returns once they can be fetched."""
        if self._store is not None:
            await self._store.write(blocks)
            return
        leased = [LeasedBlock(block.key, block.block_id, block.num_tokens) for block in blocks]
        self._give_back(self._leases.grant(ticket.transfer_id, leased))

    async def store(self, blocks: Sequence[KVBlock]) -> None:
        """As `publish`, without a ticket: for a store, when nobody is waiting for the blocks."""
        if self._store is None:
            raise ValueError(f"{self._connector.name} is no store")
        await self._store.write(blocks)

    def commit(self, transfer_id: TransferId) -> None:
        """All blocks of the transfer have been published: its lease begins anew."""
        self._leases.keep_alive(transfer_id)

    def abort(self, transfer_id: TransferId) -> None:
        """End the lease: free at once the blocks that no transport is reading, and the others when it lets go."""
        self._give_back(self._leases.end(transfer_id))

    # What a peer connector asks for: BlockSource.

    @property
    def pool(self) -> memoryview | None:
        return self._memory.pool

    def borrow(self, transfer_id: TransferId, key: BlockKey) -> Frame | None:
        block = self._leases.borrow(transfer_id, key)
        if block is None:
            return None
        # Bounds the memory that packed copies take, however many receivers ask: beyond it, blocks go unpacked.
        packs = self._outflow.num_bytes_lent < self._max_packed_bytes
        try:
            frame = self._encoder.frame(block.key, block.block_id, block.num_tokens, packs=packs)
        except BaseException:
            self._give_back(self._leases.give_back(transfer_id, key))
            raise
        block.payload_bytes.append(frame.payload.nbytes)
        self._outflow.lent(frame.payload.nbytes)
        return frame

    def give_back(self, transfer_id: TransferId, key: BlockKey) -> None:
        block = self._leases.borrowed(transfer_id, key)
        released = self._leases.give_back(transfer_id, key)
        self._outflow.given_back(block.payload_bytes.pop())
        self._give_back(released)

    def released(self, transfer_id: TransferId) -> None:
        self.abort(transfer_id)

    def keep_alive(self, transfer_id: TransferId) -> None:
        self._leases.keep_alive(transfer_id)

    def _give_back(self, block_ids: Sequence[BlockId]) -> None:
        if block_ids:
            self._release_blocks(block_ids)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._settings.lease_s / 4))
            for transfer_id in self._leases.expired():
                log.warning("transfer %s: lease expired, nobody fetched in %g s", transfer_id, self._settings.lease_s)
                self.metrics.leases_expired += 1
                self.abort(transfer_id)
