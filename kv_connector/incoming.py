"""One incoming transfer, from the first promise to the last block.

promised --progress--> ready --fetch--> landed      verified, copied to its place, reported
    |                    |
    +--commit, abort     +--refused twice, too late, not there
    |                    |
    +--------------------+------------> missing     the engine computes it
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from kvasir.common.errors import KVTransferError
from kvasir.engine.types import BlockId, KVLayout
from kvasir.kv_connector.base import BlockKey, BlockMemory, Frame
from kvasir.kv_connector.header import BadFrame, Expected, verify
from kvasir.kv_connector.metrics import MissReason, TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings

log = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class WantedBlock:
    index: int  # in the prompt's block table
    key: BlockKey
    block_id: BlockId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TransferResult:
    num_fetched: int
    missing: tuple[int, ...]  # indices, ascending
    num_bytes: int
    transfer_s: float  # time in which something was being fetched
    overlapped_s: float  # the part of it before the sender had published its last block


@dataclass(frozen=True, slots=True)
class ReceiverParts:
    """What all transfers of one receiver share."""

    memory: BlockMemory
    kv_identity: bytes
    settings: ConnectorSettings
    clock: Callable[[], float]
    metrics: TransferMetrics

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout


class Source(Protocol):
    """Where blocks come from: a peer by ticket, or a store."""

    lost: MissReason  # what it is called when the source fails as a whole
    has_one_epoch: bool  # all blocks of a transfer come from one process

    def fetch(self, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]: ...
    async def keep_alive(self) -> None: ...
    async def finish(self, unusable: Sequence[BlockKey]) -> None:
        """Nothing more is wanted; these keys gave unusable blocks twice."""
        ...

    def timed_out(self) -> None:
        """Blocks did not come within their deadline."""
        ...

    def failed(self, error: KVTransferError) -> None: ...


class IncomingTransfer:
    """Made by `KVReceiver`. Runs by itself until every wanted block has landed or is missing."""

    def __init__(
        self, parts: ReceiverParts, source: Source, wanted: Sequence[WantedBlock], on_block: Callable[[int], None]
    ) -> None:
        self._parts = parts
        self._source = source
        self._on_block = on_block
        self._wanted = sorted(wanted, key=lambda block: block.index)
        self._promised = deque(self._wanted)
        self._ready: list[WantedBlock] = []
        self._in_flight: dict[BlockKey, WantedBlock] = {}
        self._landed: set[int] = set()
        self._deadline_s = 0.0  # of what is ready or in flight
        self._epoch: str | None = None
        self._busy: list[tuple[float, float]] = []
        self._published_all_s = float("inf")
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    # What the node says.

    def progress(self, num_blocks: int, committed: bool = False) -> None:
        """The first `num_blocks` blocks of the prompt can be fetched; committed: there will be no others."""
        num_ready = len(self._ready)
        while self._promised and self._promised[0].index < num_blocks:
            self._ready.append(self._promised.popleft())
        if len(self._ready) > num_ready:
            outstanding = (len(self._ready) + len(self._in_flight)) * self._parts.layout.bytes_per_block
            self._deadline_s = self._parts.clock() + self._parts.settings.transfer_allowance_s(outstanding)
            self._news.set()
        if committed:
            self._no_more()

    def abort(self, reason: str) -> None:
        """No further block will be published. Those that are may still be fetched."""
        if self._promised:
            log.info("%d promised blocks will not come: %s", len(self._promised), reason)
        self._no_more()

    def cancel(self) -> None:
        """Nothing is wanted any more."""
        self._task.cancel()

    async def done(self) -> TransferResult:
        """When nothing will touch the blocks any more."""
        await asyncio.wait({self._task})
        return self._result()

    def on_done(self, callback: "Callable[[IncomingTransfer], None]") -> None:
        self._task.add_done_callback(lambda _: callback(self))

    # The transfer itself.

    def _no_more(self) -> None:
        self._published_all_s = min(self._published_all_s, self._parts.clock())
        self._promised.clear()
        self._news.set()

    async def _run(self) -> None:
        unusable: list[WantedBlock] = []
        try:
            while self._promised or self._ready:
                if self._ready:
                    unusable += await self._fetch_ready()
                else:
                    await self._wait_for_news()
            async with asyncio.timeout(_FINISH_TIMEOUT_S):
                await self._source.finish([block.key for block in unusable])
        except (KVTransferError, TimeoutError) as error:
            log.debug("end of a transfer: %r", error)
        except Exception:
            log.exception("a transfer failed in an unforeseen way; what is missing will be computed")
        finally:
            self._count()

    async def _wait_for_news(self) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(self._parts.settings.lease_s / 3):
                await self._news.wait()
        except TimeoutError:
            with suppress(KVTransferError):  # that a promise stays one is not the transport's to say
                await self._source.keep_alive()

    async def _fetch_ready(self) -> list[WantedBlock]:
        """Two attempts at all that is ready; what came, but was refused both times, is returned."""
        deadline_s, start_s = self._deadline_s, self._parts.clock()
        ready, self._ready = self._ready, []
        try:
            refused, lost = await self._attempt(ready, deadline_s)
            if refused or lost:
                self._parts.metrics.retries += len(refused) + len(lost)
                refused, lost = await self._attempt(refused + lost, deadline_s)
                self._parts.metrics.miss(self._source.lost, len(lost))
            return refused
        finally:
            self._busy.append((start_s, self._parts.clock()))

    async def _attempt(
        self, blocks: Sequence[WantedBlock], deadline_s: float
    ) -> tuple[list[WantedBlock], list[WantedBlock]]:
        """Fetch, and return what may be tried again: what was refused, and what never came."""
        self._in_flight = {block.key: block for block in blocks}
        refused: list[WantedBlock] = []
        try:
            async with (
                asyncio.timeout(deadline_s - self._parts.clock()),
                aclosing(self._source.fetch(list(self._in_flight))) as frames,
            ):
                async for key, frame in frames:
                    block = self._in_flight.pop(key, None)
                    if block is None:
                        continue  # a duplicate
                    if frame is None:
                        self._parts.metrics.miss(MissReason.ABSENT)
                    elif not self._land(block, frame):
                        refused.append(block)
                    await asyncio.sleep(0)  # a burst of blocks must not keep the event loop for itself
        except TimeoutError:
            self._source.timed_out()
            self._parts.metrics.miss(MissReason.TIMEOUT, len(self._in_flight))
            self._in_flight.clear()
        except KVTransferError as error:
            self._source.failed(error)
        lost = list(self._in_flight.values())
        self._in_flight.clear()
        return refused, lost

    def _land(self, block: WantedBlock, frame: Frame) -> bool:
        parts = self._parts
        expected = Expected(
            kv_identity=parts.kv_identity,
            layout=parts.layout,
            key=block.key,
            num_tokens=block.num_tokens,
            sender_epoch=self._epoch,
        )
        try:
            header = verify(frame, expected)
        except BadFrame as error:
            log.warning("block %d refused: %s", block.index, error)
            parts.metrics.miss(error.reason)
            return False
        if self._source.has_one_epoch:
            self._epoch = header.sender_epoch
        parts.memory.write(block.block_id, frame.payload)
        self._landed.add(block.index)
        parts.metrics.blocks_fetched += 1
        parts.metrics.bytes_fetched += frame.payload.nbytes
        self._on_block(block.index)
        return True

    def _result(self) -> TransferResult:
        return TransferResult(
            num_fetched=len(self._landed),
            missing=tuple(block.index for block in self._wanted if block.index not in self._landed),
            num_bytes=len(self._landed) * self._parts.layout.bytes_per_block,
            transfer_s=sum(stop - start for start, stop in self._busy),
            overlapped_s=sum(max(0.0, min(stop, self._published_all_s) - start) for start, stop in self._busy),
        )

    def _count(self) -> None:
        metrics, result = self._parts.metrics, self._result()
        metrics.transfers += 1
        metrics.transfer_s += result.transfer_s
        metrics.overlapped_s += result.overlapped_s
        log.debug("transfer ended: %s", result)
