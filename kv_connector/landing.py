"""Taking in a block that has arrived: check all of it, decode it, write it to its place in the cache."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.common.own_time import OwnTime
from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import BlockHeader, BlockKey, BlockMemory, Frame, KVBlock
from kvasir.kv_connector.codec import decode_into, is_loaded, load
from kvasir.kv_connector.costs import Rates
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.forms import is_exact, stored_as
from kvasir.kv_connector.header import Expected, verify
from kvasir.kv_connector.metrics import MissReason, TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings


@dataclass(frozen=True, slots=True)
class ReceiverParts:
    """What all transfers of one receiver share."""

    memory: BlockMemory
    kv_identity: bytes
    settings: ConnectorSettings
    clock: OwnTime
    metrics: TransferMetrics
    rates: Rates

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout


class Landed(NamedTuple):
    is_exact: bool
    num_bytes: int  # as it travelled
    sender_epoch: str


class Landing:
    """The blocks of one transfer. `form`: the only form that is accepted; None: any.

    A store's blocks may be written to their place by the threads that read them (`on_threads`). Like all others, they
    count as landed only when the event loop calls `land` for them.
    """

    def __init__(self, parts: ReceiverParts, form: str | None, has_one_epoch: bool) -> None:
        self.indices: set[int] = set()
        self.num_bytes = 0  # as they travelled
        self._parts = parts
        self._form = form
        self._has_one_epoch = has_one_epoch
        self._epoch: str | None = None
        self._early: dict[BlockKey, Landed | BadFrame] = {}

    def on_threads(self, blocks: Iterable[KVBlock]) -> Callable[[BlockKey, Frame], None]:
        """A function that takes in these blocks, on any thread, for one attempt. Earlier results are dropped."""
        by_key = {block.key: block for block in blocks}
        early: dict[BlockKey, Landed | BadFrame] = {}
        self._early = early
        loop = asyncio.get_running_loop()

        def land_early(key: BlockKey, frame: Frame) -> None:
            if key in by_key:
                try:
                    early[key] = self._land_on_thread(loop, by_key[key], frame)
                except BadFrame as error:
                    early[key] = error

        return land_early

    async def land(self, block: KVBlock, frame: Frame) -> bool:
        """Take in a block. Returns whether it is exactly what this node would have computed.

        Raises BadFrame, and then nothing has been written. Waits for the codec to be loaded if this is its first block
        here, since only a block tells which codec a sender uses.
        """
        outcome = self._early.pop(block.key, None)
        if outcome is None:
            header = self._verified(block, frame)
            parts = self._parts
            if not is_loaded(header.codec, header.layout, parts.memory):
                with parts.clock.standing_still():
                    await asyncio.to_thread(load, header.codec, header.layout, parts.layout)
            outcome = self._unpacked(block, header, frame)
        if isinstance(outcome, BadFrame):
            raise outcome
        if self._has_one_epoch:
            self._epoch = outcome.sender_epoch
        self.indices.add(block.index)
        self.num_bytes += outcome.num_bytes
        metrics = self._parts.metrics
        metrics.blocks_fetched += 1
        metrics.bytes_fetched += outcome.num_bytes
        metrics.blocks_inexact += not outcome.is_exact
        return outcome.is_exact

    def _land_on_thread(self, loop: asyncio.AbstractEventLoop, block: KVBlock, frame: Frame) -> Landed:
        parts, header = self._parts, self._verified(block, frame)
        if not is_loaded(header.codec, header.layout, parts.memory):
            standing = parts.clock.standing_still()
            loop.call_soon_threadsafe(standing.__enter__)
            try:
                load(header.codec, header.layout, parts.layout)
            finally:
                loop.call_soon_threadsafe(standing.__exit__, None, None, None)
        return self._unpacked(block, header, frame)

    def _verified(self, block: KVBlock, frame: Frame) -> BlockHeader:
        parts = self._parts
        expected = Expected(
            kv_identity=parts.kv_identity,
            layout=parts.layout,
            key=block.key,
            num_tokens=block.num_tokens,
            sender_epoch=self._epoch,
        )
        header = verify(frame, expected)
        self._check_form(header)
        return header

    def _unpacked(self, block: KVBlock, header: BlockHeader, frame: Frame) -> Landed:
        parts = self._parts
        decode_into(parts.memory, block.block_id, header, frame.payload)
        exact = is_exact(header.codec, header.layout, parts.layout)
        return Landed(exact, frame.payload.nbytes, header.sender_epoch)

    def _check_form(self, header: BlockHeader) -> None:
        """A block must have the form under which it is stored: no lossy block under an exact key, say."""
        if self._form is not None and (found := stored_as(header.codec, header.layout)) != self._form:
            raise BadFrame(MissReason.CODEC, f"it is stored as {self._form}, and is {found}")
