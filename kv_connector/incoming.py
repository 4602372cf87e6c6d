"""One incoming transfer: the blocks that a node wants of one prompt, from the sender's promise to the last arrival.

promised --progress--> ready --fetch--> landed      verified, decoded into this node's cache, reported
    |                    |
    +--commit, abort     +--refused twice, too late, not there, slower than computing it here
    |                    |
    +--------------------+------------> missing     the engine computes it
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import KVBlock
from kvasir.kv_connector.costs import ComputeCost
from kvasir.kv_connector.fetching import Fetcher, OnBlock
from kvasir.kv_connector.landing import Landing, ReceiverParts
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.pace import Pace, TooSlow
from kvasir.kv_connector.sources import Source, keep_alive

log = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 1.0


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
        self._landing = Landing(parts, source.form, source.has_one_epoch)
        self._meter = parts.rates.of(source.name)
        pace = Pace(parts.settings.costs, self._meter, parts.layout.bytes_per_block, compute_s, parts.clock)
        self._fetcher = Fetcher(parts, source, self._landing, pace, on_block, self._not_asked_for)
        self._wanted = sorted(wanted, key=lambda block: block.index)
        self._promised = deque(self._wanted)
        self._ready: list[KVBlock] = []
        self._deadline_s = 0.0  # of what is ready or in flight
        self._busy: list[tuple[float, float]] = []  # start and end of each fetch
        self._published_all_s = float("inf")
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def num_outstanding(self) -> int:
        """Blocks that have been published, and have neither landed nor been given up."""
        return len(self._ready) + len(self._fetcher.in_flight)

    # What the node tells us.

    def progress(self, num_blocks: int, committed: bool = False) -> None:
        """The first `num_blocks` blocks of the prompt can be fetched. `committed`: no others will follow."""
        num_ready = len(self._ready)
        while self._promised and self._promised[0].index < num_blocks:
            self._ready.append(self._promised.popleft())
        if len(self._ready) > num_ready:
            num_bytes = self.num_outstanding * self._parts.layout.bytes_per_block
            allowance_s = self._parts.settings.transfer_allowance_s(num_bytes, self._meter.bandwidth_bytes_per_s)
            self._deadline_s = self._parts.clock() + allowance_s
            self._news.set()
        if committed:
            self._expect_no_more()

    def abort(self, reason: str) -> None:
        """The sender will publish no further blocks. Those that it has published are still fetched."""
        if self._promised:
            log.info("%d promised blocks will not come: %s", len(self._promised), reason)
        self._expect_no_more()

    def cancel(self) -> None:
        """Stop fetching. The sender keeps its blocks, since another node may fetch them with the same ticket."""
        self._task.cancel()

    async def done(self) -> TransferResult:
        """Returns when this transfer will write to no block any more."""
        await asyncio.wait({self._task})
        return self._result()

    def on_done(self, callback: "Callable[[IncomingTransfer], None]") -> None:
        self._task.add_done_callback(lambda _: callback(self))

    # The transfer itself.

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
        """Fetch all blocks that are ready. Returns those that came unusable twice."""
        start_s = self._parts.clock()
        ready, self._ready = self._ready, []
        try:
            return await self._fetcher.fetch(ready, self._deadline_s)
        except TooSlow as verdict:
            self._compute_the_rest(verdict)
            return []
        finally:
            self._fetcher.in_flight.clear()
            self._busy.append((start_s, self._parts.clock()))

    def _not_asked_for(self) -> list[KVBlock]:
        return [*self._ready, *self._promised]

    def _expect_no_more(self) -> None:
        self._published_all_s = min(self._published_all_s, self._parts.clock())
        self._promised.clear()
        self._news.set()

    def _compute_the_rest(self, verdict: TooSlow) -> None:
        num_given_up = len(self._fetcher.at_stake)
        log.info("%s is too slow (%s): %d blocks are computed here", self._source.name, verdict, num_given_up)
        self._parts.metrics.declined += 1
        self._parts.metrics.miss(MissReason.SLOW, num_given_up)
        self._ready.clear()
        self._expect_no_more()

    # What came of it.

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
