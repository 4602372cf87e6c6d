"""Blocks on their way into a store: those that it lacks are packed and written, and then all are given back.

A caller does not wait for a store that hangs. A caller that leaves does not free blocks that are still being read.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kvasir.common.errors import KVTransferError
from kvasir.common.own_time import Limit, OwnTime
from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector.base import Frame, KVBlock, StoreConnector, StoreKey
from kvasir.kv_connector.encoder import Encoder
from kvasir.kv_connector.forms import CODEC_NONE
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.store_guard import StoreGuard
from kvasir.kv_connector.stored import store_key

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # after its deadline, for a store to let go of what it reads
_MAX_PACKED_BYTES = 32 << 20  # blocks that are packed and written together


Named = tuple[StoreKey, KVBlock]


class StoreWriter:
    def __init__(
        self,
        store: StoreConnector,
        encoder: Encoder,
        layout: KVLayout,
        settings: ConnectorSettings,
        release_blocks: Callable[[Sequence[BlockId]], None],
        clock: Callable[[], float],
        metrics: TransferMetrics,
    ) -> None:
        self.num_blocks = 0  # being written
        self._store = store
        self._encoder = encoder
        self._layout = layout
        self._settings = settings
        self._release_blocks = release_blocks
        self._clock = clock
        self._metrics = metrics
        self._guard = StoreGuard(f"writing to {store.name}", settings.store_backoff_s, clock, metrics)
        self._tasks: set[asyncio.Task[None]] = set()

    async def write(self, blocks: Sequence[KVBlock]) -> None:
        """Take over these blocks, also if this raises. Returns once all of them can be fetched."""
        clock = OwnTime(self._clock)  # of these blocks only: it stands still while they are packed
        task = asyncio.create_task(self._write_and_give_back(blocks, clock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio logs it
        with suppress(TimeoutError):
            async with Limit(clock, clock() + self._allowance_s(blocks) + _GRACE_S):
                await asyncio.wait({task})
        if not task.done():
            self._guard.failed("it hangs")
            raise KVTransferError(f"{self._store.name} hangs; {len(blocks)} blocks wait for it")
        task.result()

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GRACE_S)

    def _allowance_s(self, blocks: Sequence[KVBlock]) -> float:
        num_bytes = len(blocks) * self._layout.bytes_per_block
        return self._settings.transfer_allowance_s(num_bytes, self._encoder.outgoing.bandwidth_bytes_per_s)

    async def _write_and_give_back(self, blocks: Sequence[KVBlock], clock: OwnTime) -> None:
        self.num_blocks += len(blocks)
        try:
            await self._write_missing(blocks, clock)
        finally:
            self.num_blocks -= len(blocks)
            self._release_blocks([block.block_id for block in blocks])

    async def _write_missing(self, blocks: Sequence[KVBlock], clock: OwnTime) -> None:
        deadline_s, num_left = clock() + self._allowance_s(blocks), len(blocks)
        names = [store_key(block.key, self._layout, self._encoder.form) for block in blocks]
        try:
            with self._guard.attempt():
                async with Limit(clock, deadline_s):
                    stored = await self._store.contains(names)
                missing = [named for named, has in zip(zip(names, blocks, strict=True), stored, strict=True) if not has]
                self._metrics.blocks_already_stored += len(blocks) - len(missing)
                num_left = len(missing)
                for part in self._parts(missing):
                    await self._write(part, clock, deadline_s)
                    num_left -= len(part)
        finally:
            self._metrics.blocks_not_stored += num_left

    async def _write(self, part: Sequence[Named], clock: OwnTime, deadline_s: float) -> None:
        sizes: list[int] = []
        with clock.standing_still():
            frames = await self._pack(part, sizes)
        started_s = clock()
        async with Limit(clock, deadline_s):
            await self._store.put(frames)
        elapsed_s, num_bytes = clock() - started_s, sum(sizes)
        self._encoder.outgoing.note(num_bytes, elapsed_s)
        self._metrics.stored(len(part), num_bytes, elapsed_s)
        log.debug("%s has taken %d blocks, %d bytes, in %.3f s", self._store.name, len(part), num_bytes, elapsed_s)

    def _parts(self, missing: Sequence[Named]) -> Iterator[Sequence[Named]]:
        size = max(1, _MAX_PACKED_BYTES // self._layout.bytes_per_block)
        return (missing[start : start + size] for start in range(0, len(missing), size))

    async def _pack(self, part: Sequence[Named], sizes: list[int]) -> Iterable[tuple[StoreKey, Frame]]:
        """The frames to write. `sizes` collects the bytes of each payload.

        Without a codec, making a frame is only a checksum, so each is made just before it is written, which finds the
        bytes in the CPU's cache. With a codec, all are packed beforehand on a thread: so packing cannot be interrupted,
        and does not count as the store's time.
        """

        def pack() -> Iterator[tuple[StoreKey, Frame]]:
            for name, block in part:
                frame = self._encoder.frame(block.key, block.block_id, block.num_tokens)
                sizes.append(frame.payload.nbytes)
                yield name, frame

        return pack() if self._encoder.codec() == CODEC_NONE else await asyncio.to_thread(list, pack())
