"""A block that has come: believed once all of it is as it should be, unpacked, and put in its place."""

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.engine.types import BlockId, KVLayout
from kvasir.kv_connector.base import BlockHeader, BlockKey, BlockMemory, Frame
from kvasir.kv_connector.codec import decode, is_exact, stored_as
from kvasir.kv_connector.costs import Rates
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.header import Expected, verify
from kvasir.kv_connector.metrics import MissReason, TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings


@dataclass(frozen=True, slots=True)
class WantedBlock:
    index: int  # in the prompt's block table
    key: BlockKey
    block_id: BlockId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ReceiverParts:
    """What all transfers of one receiver share."""

    memory: BlockMemory
    kv_identity: bytes
    settings: ConnectorSettings
    clock: Callable[[], float]
    metrics: TransferMetrics
    rates: Rates

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout


@dataclass(frozen=True, slots=True)
class TransferResult:
    num_fetched: int
    missing: tuple[int, ...]  # indices, ascending
    num_bytes: int  # as they travelled
    transfer_s: float  # time in which something was being fetched
    overlapped_s: float  # the part of it before the sender had published its last block


class Landing:
    """One transfer's blocks. `form`: the one under which a store was asked for them, and so the only one allowed."""

    def __init__(self, parts: ReceiverParts, form: str | None, has_one_epoch: bool) -> None:
        self.indices: set[int] = set()
        self.num_bytes = 0  # as they travelled
        self._parts = parts
        self._form = form
        self._has_one_epoch = has_one_epoch
        self._epoch: str | None = None

    def land(self, block: WantedBlock, frame: Frame) -> bool:
        """Whether it is exactly what this node would have computed. Raises BadFrame, and nothing has been written."""
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
        payload = decode(header, frame.payload, parts.layout)
        if self._has_one_epoch:
            self._epoch = header.sender_epoch
        parts.memory.write(block.block_id, payload)
        exact = is_exact(header.codec, header.layout, parts.layout)
        self.indices.add(block.index)
        self.num_bytes += frame.payload.nbytes
        parts.metrics.blocks_fetched += 1
        parts.metrics.bytes_fetched += frame.payload.nbytes
        parts.metrics.blocks_inexact += not exact
        return exact

    def _check_form(self, header: BlockHeader) -> None:
        """What lies under an exact key is no lossy codec's, and under float32 no bfloat16."""
        found = stored_as(header.codec, header.layout)
        if self._form not in (None, found):
            raise BadFrame(MissReason.CODEC, f"it is stored as {self._form}, and is {found}")
