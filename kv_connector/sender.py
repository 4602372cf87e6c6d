"""The sending half of a node: what has been computed is published, block by block, and stays until it is let go.

Whatever happens, each published block's one reference is given back exactly once, through `release_blocks`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.common.errors import KVTransferError
from kvasir.engine.types import BlockId
from kvasir.kv_connector.base import (
    BlockHeader,
    BlockKey,
    BlockMemory,
    Frame,
    KVConnector,
    StoreConnector,
    Ticket,
    TransferId,
)
from kvasir.kv_connector.header import checksum_of, max_payload_bytes, pack, store_key
from kvasir.kv_connector.leases import LeasedBlock, Leases
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.store_guard import StoreGuard

log = logging.getLogger(__name__)

_STORE_GRACE_S = 1.0  # beyond its time, for a store to let go of what it reads


@dataclass(frozen=True, slots=True)
class OutgoingBlock:
    index: int  # in the prompt's block table
    key: BlockKey
    block_id: BlockId
    num_tokens: int


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
        self._kv_identity = kv_identity
        self._epoch = epoch
        self._release_blocks = release_blocks
        self._settings = settings
        self._leases = Leases(settings.lease_s, clock)
        self._guard = StoreGuard(f"writing to {connector.name}", settings.store_backoff_s, clock, self.metrics)
        self._stores: set[asyncio.Task[None]] = set()
        self._num_being_stored = 0
        self._expiry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._connector.open(self, max_payload_bytes(self._memory.layout))
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Closes the connector too. All blocks have been given back after it, but those that a store hangs on."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._stores:
            await asyncio.wait(self._stores, timeout=_STORE_GRACE_S)
        for transfer_id in self._leases.all_transfers():
            self.abort(transfer_id)
        await self._connector.close()

    @property
    def num_leased_blocks(self) -> int:
        return self._leases.num_blocks + self._num_being_stored

    async def publish(self, ticket: Ticket, blocks: Sequence[OutgoingBlock]) -> None:
        """Returns when the blocks can be fetched. They are ours from here on, also where this raises."""
        if not self._connector.is_store:
            leased = [LeasedBlock(block.key, block.block_id, block.num_tokens) for block in blocks]
            self._give_back(self._leases.grant(ticket.transfer_id, leased))
            return
        # A task of its own: neither a caller that is cancelled nor a store that hangs may free blocks that are
        # still being read, and neither may a store that hangs keep the caller.
        store = asyncio.create_task(self._store_and_give_back(self._connector, blocks))
        self._stores.add(store)
        store.add_done_callback(self._stores.discard)
        store.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, if only by us
        await asyncio.wait({store}, timeout=self._allowance_s(len(blocks)) + _STORE_GRACE_S)
        if not store.done():
            self._guard.failed("it hangs")
            raise KVTransferError(f"{self._connector.name} hangs; {len(blocks)} blocks wait for it")
        store.result()

    def commit(self, transfer_id: TransferId) -> None:
        """All blocks of the transfer are published."""
        self._leases.keep_alive(transfer_id)

    def abort(self, transfer_id: TransferId) -> None:
        """Free at once what no transfer touches, and the rest at its end."""
        self._give_back(self._leases.end(transfer_id))

    # What a peer connector asks for: BlockSource.

    @property
    def pool(self) -> memoryview | None:
        return self._memory.pool

    def borrow(self, transfer_id: TransferId, key: BlockKey) -> Frame | None:
        block = self._leases.borrow(transfer_id, key)
        if block is None:
            return None
        payload = self._memory.read(block.block_id)
        if block.header is None:
            block.header = self._header(block.key, block.num_tokens, payload)
        self.metrics.blocks_sent += 1
        self.metrics.bytes_sent += payload.nbytes
        return Frame(block.header, payload)

    def give_back(self, transfer_id: TransferId, key: BlockKey) -> None:
        self._give_back(self._leases.give_back(transfer_id, key))

    def released(self, transfer_id: TransferId) -> None:
        self._give_back(self._leases.end(transfer_id))

    def keep_alive(self, transfer_id: TransferId) -> None:
        self._leases.keep_alive(transfer_id)

    def _give_back(self, block_ids: Sequence[BlockId]) -> None:
        if block_ids:
            self._release_blocks(block_ids)

    def _header(self, key: BlockKey, num_tokens: int, payload: memoryview) -> bytes:
        return pack(
            BlockHeader(
                kv_identity=self._kv_identity,
                layout=self._memory.layout,
                key=key,
                num_tokens=num_tokens,
                payload_bytes=payload.nbytes,
                checksum=checksum_of(payload),
                sender_epoch=self._epoch,
            )
        )

    async def _store_and_give_back(self, store: StoreConnector, blocks: Sequence[OutgoingBlock]) -> None:
        self._num_being_stored += len(blocks)
        try:
            await self._store(store, blocks)
        finally:
            self._num_being_stored -= len(blocks)
            self._give_back([block.block_id for block in blocks])

    async def _store(self, store: StoreConnector, blocks: Sequence[OutgoingBlock]) -> None:
        layout = self._memory.layout
        keys = [store_key(block.key, layout) for block in blocks]
        with self._guard.attempt():
            async with asyncio.timeout(self._allowance_s(len(blocks))):
                stored = await store.contains(keys)
                frames = []
                for key, block, is_stored in zip(keys, blocks, stored, strict=True):
                    if not is_stored:
                        payload = self._memory.read(block.block_id)
                        frames.append((key, Frame(self._header(block.key, block.num_tokens, payload), payload)))
                if frames:
                    await store.put(frames)
        self.metrics.blocks_already_stored += len(blocks) - len(frames)
        self.metrics.blocks_stored += len(frames)
        self.metrics.bytes_stored += sum(frame.payload.nbytes for _, frame in frames)

    def _allowance_s(self, num_blocks: int) -> float:
        return self._settings.transfer_allowance_s(num_blocks * self._memory.layout.bytes_per_block)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._settings.lease_s / 4))
            for transfer_id in self._leases.expired():
                log.warning("transfer %s: lease expired, nobody fetched in %g s", transfer_id, self._settings.lease_s)
                self.metrics.leases_expired += 1
                self.abort(transfer_id)
