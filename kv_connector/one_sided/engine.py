"""What an engine for one-sided reads must do for `OneSidedConnector`.

All methods but one block, and are called outside the event loop: those of one channel by one thread at a time, those
of an engine by any. They raise whatever they like; a connector makes a lost peer of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks of one size, one behind the other, in the memory of some process."""

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
        """Which block of this pool, in this process, the payload is; None if it is none."""
        if payload.nbytes != self.block_bytes or not payload.nbytes:
            return None
        block, rest = divmod(_address_of(payload) - self.address, self.block_bytes)
        return block if rest == 0 and 0 <= block < self.num_blocks else None

    def address_of(self, block: int) -> int:
        return self.address + block * self.block_bytes


class ReadChannel(Protocol):
    """From one remote pool to one local one."""

    def read(self, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> None:
        """Copy block `remote[i]` to `local[i]`, for all i. Returns when all have arrived.

        If it raises, or is not back in time, the channel is closed and nothing of what it wrote is used.
        """
        ...

    def close(self) -> None:
        """Returns when nothing will be written to the local pool any more, whatever a frozen peer does when it thaws.

        That may be never: the local pool stays where it is until then, or for ever if this raises.
        """
        ...


class ReadEngine(Protocol):
    def open(self, lent: Pool | None) -> bytes:
        """Let others read this pool. Returns what their `connect` must be told."""
        ...

    def lending(self, is_lending: bool) -> None:
        """Whether somebody may be reading now. Called on the event loop; does not block."""
        ...

    def connect(self, description: bytes, remote: Pool, local: Pool) -> ReadChannel:
        """`description` comes from a node that knows the cluster's secret; `local` is of this process alone."""
        ...

    def close(self) -> None:
        """Ends the waiting of channels that are being closed. No one reads the pool any more when this returns."""
        ...


def _address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer.cast("B"), np.uint8).ctypes.data)
