"""What an engine for one-sided reads must do for `OneSidedConnector`.

All methods except `ReadEngine.lending` may block, and are called outside the event loop. A channel is used by one
thread at a time, an engine by any. They may raise anything; the connector treats the peer as lost then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of one size, contiguous in the memory of some process."""

    address: int
    block_bytes: int
    num_blocks: int

    @classmethod
    def of(cls, blocks: memoryview) -> Self:
        """`blocks` is [blocks, bytes of a block]."""
        num_blocks, block_bytes = blocks.shape or (0, 0)
        return cls(_address_of(blocks), block_bytes, num_blocks)

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def block_at(self, payload: memoryview) -> int | None:
        """The index of the block of this pool, in this process, that `payload` shows; None if it lies elsewhere."""
        if payload.nbytes != self.block_bytes or not payload.nbytes:
            return None
        block, rest = divmod(_address_of(payload) - self.address, self.block_bytes)
        return block if rest == 0 and 0 <= block < self.num_blocks else None

    def address_of(self, block: int) -> int:
        return self.address + block * self.block_bytes


class ReadChannel(Protocol):
    """Reads from one remote pool into one local one."""

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        """Copy block `remote[i]` to block `local[i]`, for all i. Returns when all have arrived.

        If it raises, or does not return in time, the channel is closed and nothing that it wrote is used.
        """
        ...

    def close(self) -> None:
        """Returns when nothing can be written to the local pool any more, not even by a frozen peer that goes on.

        That may take for ever. The local pool is kept allocated until this returns, and for good if it raises.
        """
        ...


class ReadEngine(Protocol):
    def open(self, lent: Pool | None) -> bytes:
        """Let others read this pool. Returns the `description` that their `connect` needs."""
        ...

    def lending(self, is_lending: bool) -> None:
        """Told whether any receiver may be reading now. Called on the event loop, so it must not block."""
        ...

    def connect(self, description: bytes, remote: Pool, local: Pool) -> ReadChannel:
        """`description` comes from a node that has proved the cluster's secret; `local` is memory of this process."""
        ...

    def close(self) -> None:
        """Makes channels that wait in `close` raise or return. No one reads the pool any more when this returns."""
        ...


def _address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer.cast("B"), np.uint8).ctypes.data)
