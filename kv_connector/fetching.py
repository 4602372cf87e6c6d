"""Fetching published blocks: two attempts at each, and giving up when computing them here would be faster."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from kvasir.common.errors import KVTransferError
from kvasir.common.own_time import Limit
from kvasir.kv_connector.base import BlockKey, Frame, KVBlock
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.landing import Landing, ReceiverParts
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.pace import Pace, TooSlow
from kvasir.kv_connector.sources import Source

log = logging.getLogger(__name__)

_TURN_S = 0.002  # a burst of blocks lets the event loop do other work this often

Frames = AsyncIterator[tuple[BlockKey, Frame | None]]
OnBlock = Callable[[int, bool], None]  # index; whether it is exactly what this node would have computed


class Fetcher:
    """Fetches the blocks of one transfer, one batch after the other.

    `later` names the blocks that are not asked for yet. They would come no faster than those that are, so fetching is
    weighed against computing for all of them together, and they are given up together.
    """

    def __init__(
        self,
        parts: ReceiverParts,
        source: Source,
        landing: Landing,
        pace: Pace,
        on_block: OnBlock,
        later: Callable[[], Sequence[KVBlock]],
    ) -> None:
        self.in_flight: dict[BlockKey, KVBlock] = {}
        self._parts = parts
        self._source = source
        self._landing = landing
        self._pace = pace
        self._on_block = on_block
        self._later = later
        self._waits_for_deadline = True  # else for as long as computing the blocks would take

    @property
    def at_stake(self) -> list[KVBlock]:
        """The blocks that are given up if fetching proves too slow."""
        return [*self.in_flight.values(), *self._later()]

    async def fetch(self, blocks: Sequence[KVBlock], deadline_s: float) -> list[KVBlock]:
        """Try every block twice. Returns those that arrived, but were refused both times.

        Raises TooSlow, and leaves in `in_flight` what has not come by then.
        """
        self.in_flight = {block.key: block for block in blocks}
        self._pace.check_before(self.at_stake)
        refused, lost = await self._attempt(blocks, deadline_s)
        if refused or lost:
            self._parts.metrics.retries += len(refused) + len(lost)
            refused, lost = await self._attempt(refused + lost, deadline_s)
            self._parts.metrics.miss(self._source.lost, len(lost))
        return refused

    async def _attempt(self, blocks: Sequence[KVBlock], deadline_s: float) -> tuple[list[KVBlock], list[KVBlock]]:
        """Ask once for these blocks. Returns those that may be tried again: the refused, and those that never came."""
        self.in_flight = {block.key: block for block in blocks}
        refused: list[KVBlock] = []
        limit = Limit(self._parts.clock)
        self._pace.begin()
        try:
            async with (
                limit,
                aclosing(self._source.fetch(list(self.in_flight), self._landing.on_threads(blocks))) as frames,
            ):
                await self._take_in(frames, refused, limit, deadline_s)
        except TimeoutError as error:
            if limit.expired:
                self._give_up()
            else:
                self._source.failed(KVTransferError(f"{error!r}"))
        except KVTransferError as error:
            self._source.failed(error)
        finally:
            self._pace.end(is_stuck=limit.expired)
        lost = list(self.in_flight.values())
        self.in_flight.clear()
        return refused, lost

    async def _take_in(self, frames: Frames, refused: list[KVBlock], limit: Limit, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._set_limit(limit, deadline_s)
        turn_s = loop.time()
        async for key, frame in frames:
            block = self.in_flight.pop(key, None)
            if block is None:
                continue  # a duplicate
            if frame is None:
                self._parts.metrics.miss(MissReason.ABSENT)
            elif not await self._land(block, frame):
                refused.append(block)
            else:
                self._pace.landed()
            if loop.time() - turn_s > _TURN_S:
                self._pace.check(list(self.in_flight.values()))
                self._set_limit(limit, deadline_s)
                await asyncio.sleep(0)
                turn_s = loop.time()

    def _set_limit(self, limit: Limit, deadline_s: float) -> None:
        """Wait until the deadline, or until waiting for the next block would cost more than computing all at stake."""
        if limit.expired:
            return  # it takes effect at the next await
        give_up_s = self._parts.clock() + self._pace.wait_s(self.at_stake) if self.in_flight else deadline_s
        self._waits_for_deadline = deadline_s <= give_up_s
        limit.at_s = min(deadline_s, give_up_s)

    def _give_up(self) -> None:
        """The limit has passed: TooSlow, or no second attempt at blocks that missed their deadline."""
        if self.in_flight and not self._waits_for_deadline:
            raise TooSlow(f"nothing came for as long as computing {len(self.at_stake)} blocks takes") from None
        self._source.timed_out()
        self._parts.metrics.miss(MissReason.TIMEOUT, len(self.in_flight))
        self.in_flight.clear()

    async def _land(self, block: KVBlock, frame: Frame) -> bool:
        try:
            is_exact = await self._landing.land(block, frame)
        except BadFrame as error:
            log.warning("block %d refused: %s", block.index, error)
            self._parts.metrics.miss(error.reason)
            return False
        self._on_block(block.index, is_exact)
        return True
