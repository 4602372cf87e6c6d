"""One incoming transfer, from the first promise to the last block.

promised --progress--> ready --fetch--> landed      verified, unpacked in its place, reported
    |                    |
    +--commit, abort     +--refused twice, too late, not there, slower than computing it
    |                    |
    +--------------------+------------> missing     the engine computes it
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockKey, Frame, KVBlock
from kvasir.kv_connector.costs import ComputeCost
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.landing import Landing, ReceiverParts
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.own_time import Limit
from kvasir.kv_connector.pace import Pace, TooSlow
from kvasir.kv_connector.sources import Source, keep_alive

log = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 1.0
_TURN_S = 0.002

Frames = AsyncIterator[tuple[BlockKey, Frame | None]]
OnBlock = Callable[[int, bool], None]  # index; whether it is exactly what this node would have computed


@dataclass(frozen=True, slots=True)
class TransferResult:
    num_fetched: int
    missing: tuple[int, ...]  # indices, ascending
    num_bytes: int  # as they travelled
    transfer_s: float  # time in which something was being fetched
    overlapped_s: float  # the part of it before the sender had published its last block


class IncomingTransfer:
    """Made by `KVReceiver`. Runs by itself until every wanted block has landed or is missing."""

    def __init__(
        self,
        parts: ReceiverParts,
        source: Source,
        wanted: Sequence[KVBlock],
        on_block: OnBlock,
        compute_s: ComputeCost,
    ) -> None:
        self._parts = parts
        self._source = source
        self._on_block = on_block
        self._landing = Landing(parts, source.form, source.has_one_epoch)
        self._meter = parts.rates.of(source.name)
        self._pace = Pace(parts.settings.costs, self._meter, parts.layout.bytes_per_block, compute_s, parts.clock)
        self._wanted = sorted(wanted, key=lambda block: block.index)
        self._promised = deque(self._wanted)
        self._ready: list[KVBlock] = []
        self._in_flight: dict[BlockKey, KVBlock] = {}
        self._deadline_s = 0.0  # of what is ready or in flight
        self._waits_for_deadline = True  # and not only for as long as computing takes
        self._busy: list[tuple[float, float]] = []
        self._published_all_s = float("inf")
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def num_outstanding(self) -> int:
        """Blocks published, and neither landed nor given up."""
        return len(self._ready) + len(self._in_flight)

    # What the node says.

    def progress(self, num_blocks: int, committed: bool = False) -> None:
        """The first `num_blocks` blocks of the prompt can be fetched; committed: there will be no others."""
        num_ready = len(self._ready)
        while self._promised and self._promised[0].index < num_blocks:
            self._ready.append(self._promised.popleft())
        if len(self._ready) > num_ready:
            num_bytes = self.num_outstanding * self._parts.layout.bytes_per_block
            allowance_s = self._parts.settings.transfer_allowance_s(num_bytes, self._meter.bandwidth_bytes_per_s)
            self._deadline_s = self._parts.clock() + allowance_s
            self._news.set()
        if committed:
            self._no_more()

    def abort(self, reason: str) -> None:
        """No further block will be published. Those that are may still be fetched."""
        if self._promised:
            log.info("%d promised blocks will not come: %s", len(self._promised), reason)
        self._no_more()

    def cancel(self) -> None:
        """Nothing is wanted any more; another node may still want what the ticket is for."""
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
        unusable: list[KVBlock] = []
        keeping = asyncio.create_task(keep_alive(self._source, self._parts.settings.lease_s / 3))
        try:
            while self._promised or self._ready:
                if self._ready:
                    unusable += await self._fetch_ready()
                else:
                    self._news.clear()
                    await self._news.wait()
            keeping.cancel()
            async with asyncio.timeout(_FINISH_TIMEOUT_S):
                await self._source.finish([block.key for block in unusable])
        except (KVTransferError, TimeoutError) as error:
            log.debug("end of a transfer: %r", error)
        except Exception:
            log.exception("a transfer failed in an unforeseen way; what is missing will be computed")
        finally:
            keeping.cancel()
            self._promised.clear()
            self._ready.clear()
            self._count()

    async def _fetch_ready(self) -> list[KVBlock]:
        """Two attempts at all that is ready; what came, but was refused both times, is returned."""
        deadline_s, start_s = self._deadline_s, self._parts.clock()
        ready, self._ready = self._ready, []
        self._in_flight = {block.key: block for block in ready}
        try:
            self._pace.check_before(self._at_stake)
            refused, lost = await self._attempt(ready, deadline_s)
            if refused or lost:
                self._parts.metrics.retries += len(refused) + len(lost)
                refused, lost = await self._attempt(refused + lost, deadline_s)
                self._parts.metrics.miss(self._source.lost, len(lost))
            return refused
        except TooSlow as verdict:
            self._decline(verdict)
            return []
        finally:
            self._in_flight.clear()
            self._busy.append((start_s, self._parts.clock()))

    async def _attempt(self, blocks: Sequence[KVBlock], deadline_s: float) -> tuple[list[KVBlock], list[KVBlock]]:
        """Fetch, and return what may be tried again: what was refused, and what never came."""
        self._in_flight = {block.key: block for block in blocks}
        refused: list[KVBlock] = []
        limit = Limit(self._parts.clock)
        self._pace.begin()
        try:
            async with (
                limit,
                aclosing(self._source.fetch(list(self._in_flight), self._landing.on_threads(blocks))) as frames,
            ):
                await self._take_in(frames, refused, limit, deadline_s)
        except TimeoutError as error:
            if limit.expired:
                self._nothing_came()
            else:
                self._source.failed(KVTransferError(f"{error!r}"))
        except KVTransferError as error:
            self._source.failed(error)
        finally:
            self._pace.end(is_stuck=limit.expired)
        lost = self._outstanding
        self._in_flight.clear()
        return refused, lost

    async def _take_in(self, frames: Frames, refused: list[KVBlock], limit: Limit, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._set(limit, deadline_s)
        turn_s = loop.time()
        async for key, frame in frames:
            block = self._in_flight.pop(key, None)
            if block is None:
                continue  # a duplicate
            if frame is None:
                self._parts.metrics.miss(MissReason.ABSENT)
            elif not await self._land(block, frame):
                refused.append(block)
            else:
                self._pace.landed()
            if loop.time() - turn_s > _TURN_S:  # a burst of blocks must not keep the event loop for itself
                self._pace.check(self._outstanding)
                self._set(limit, deadline_s)
                await asyncio.sleep(0)
                turn_s = loop.time()

    def _nothing_came(self) -> None:
        """Until the limit."""
        if self._in_flight and not self._waits_for_deadline:
            raise TooSlow(f"nothing came for as long as computing {len(self._at_stake)} blocks takes") from None
        self._source.timed_out()
        self._parts.metrics.miss(MissReason.TIMEOUT, len(self._in_flight))
        self._in_flight.clear()

    @property
    def _at_stake(self) -> list[KVBlock]:
        """What is given up where it is too slow: also what is still promised would come no faster."""
        return [*self._in_flight.values(), *self._ready, *self._promised]

    @property
    def _outstanding(self) -> list[KVBlock]:
        return list(self._in_flight.values())

    def _set(self, limit: Limit, deadline_s: float) -> None:
        """Until the deadline, or until waiting for the next block would cost more than computing the rest."""
        if limit.expired:
            return  # it strikes as soon as we wait for anything
        give_up_s = self._parts.clock() + self._pace.wait_s(self._at_stake) if self._in_flight else deadline_s
        self._waits_for_deadline = deadline_s <= give_up_s
        limit.at_s = min(deadline_s, give_up_s)

    async def _land(self, block: KVBlock, frame: Frame) -> bool:
        try:
            is_exact = await self._landing.land(block, frame)
        except BadFrame as error:
            log.warning("block %d refused: %s", block.index, error)
            self._parts.metrics.miss(error.reason)
            return False
        self._on_block(block.index, is_exact)
        return True

    def _decline(self, verdict: TooSlow) -> None:
        given_up = len(self._at_stake)
        log.info("%s is too slow (%s): %d blocks are computed here", self._source.name, verdict, given_up)
        self._parts.metrics.declined += 1
        self._parts.metrics.miss(MissReason.SLOW, given_up)
        self._ready.clear()
        self._no_more()

    def _result(self) -> TransferResult:
        landed = self._landing.indices
        return TransferResult(
            num_fetched=len(landed),
            missing=tuple(block.index for block in self._wanted if block.index not in landed),
            num_bytes=self._landing.num_bytes,
            transfer_s=sum(stop - start for start, stop in self._busy),
            overlapped_s=sum(max(0.0, min(stop, self._published_all_s) - start) for start, stop in self._busy),
        )

    def _count(self) -> None:
        metrics, result = self._parts.metrics, self._result()
        metrics.transfers += 1
        metrics.transfer_s += result.transfer_s
        metrics.overlapped_s += result.overlapped_s
        log.debug("transfer from %s ended: %s", self._source.name, result)
