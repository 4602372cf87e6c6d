"""Host memory for the blocks of preempted requests: a fixed number of places, each free or held by one request."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvasir.engine.blocks import BlockId

HostBlock = NewType("HostBlock", int)  # index of a place in this node's swap space

_WEIGHT = 0.3  # of the newest copy in the moving average
_FORGET_AFTER = 32  # chances to copy that were not taken: then what was measured is no longer known
_ANY_BLOCK = BlockId(0)


@dataclass(frozen=True, slots=True)
class Saved:
    """What of one request is on the host."""

    places: dict[int, HostBlock]  # by index in its block table; all full, but the last where `end` says so
    end: int  # tokens up to which they are filled
    inexact_from: int | None


class HostMemory(Protocol):
    """Where the bytes are."""

    def save(self, block: BlockId, place: HostBlock) -> None: ...
    def load(self, place: HostBlock, block: BlockId) -> None: ...


class NoMemory:
    """Of no places; of any number in a simulation, whose blocks have no content."""

    def save(self, block: BlockId, place: HostBlock) -> None: ...
    def load(self, place: HostBlock, block: BlockId) -> None: ...


class SwapSpace:
    """Copies are made at once, and measured."""

    def __init__(
        self, num_blocks: int = 0, memory: HostMemory | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._num_blocks = num_blocks
        self._memory = memory or NoMemory()
        self._clock = clock
        self._free = [HostBlock(i) for i in reversed(range(num_blocks))]
        self._copy_s_per_block: float | None = None
        self._num_declined = 0
        self.num_saved_blocks = 0  # since the start
        self.num_loaded_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_blocks - len(self._free)

    @property
    def copy_s_per_block(self) -> float | None:
        """One way. None: never copied, or too long ago."""
        return self._copy_s_per_block

    def measure(self) -> None:
        """How long a copy takes, if that is not known: of one block, for nothing, and not of a whole request."""
        if self._copy_s_per_block is None and self._free:
            self._measured(self._memory.save, [_ANY_BLOCK], self._free[-1:])

    def decline(self) -> None:
        """There was room, and another way was taken."""
        self._num_declined += 1
        if self._num_declined >= _FORGET_AFTER:
            self._copy_s_per_block = None

    def save(self, blocks: Sequence[BlockId]) -> list[HostBlock]:
        """Their contents, which may be lost from now on. There must be room for them."""
        if len(blocks) > len(self._free):
            raise RuntimeError(f"{len(blocks)} blocks for {len(self._free)} free places")
        places = [self._free.pop() for _ in blocks]
        self._measured(self._memory.save, blocks, places)
        self.num_saved_blocks += len(blocks)
        return places

    def load(self, places: Sequence[HostBlock], blocks: Sequence[BlockId]) -> None:
        """Into these blocks. The places stay held."""
        self._measured(self._memory.load, places, blocks)
        self.num_loaded_blocks += len(blocks)

    def release(self, places: Iterable[HostBlock]) -> None:
        self._free.extend(places)

    def check_invariant(self, held: Sequence[HostBlock]) -> None:
        """Each place is free, or held by exactly one of those who say so."""
        assert sorted([*held, *self._free]) == list(range(self._num_blocks)), "a place is lost, or held twice"

    def _measured(self, copy: Callable[..., None], sources: Sequence[int], targets: Sequence[int]) -> None:
        if not sources:
            return
        started_s = self._clock()
        for source, target in zip(sources, targets, strict=True):
            copy(source, target)
        newest_s = (self._clock() - started_s) / len(sources)
        old_s = self._copy_s_per_block
        self._copy_s_per_block = newest_s if old_s is None else old_s + _WEIGHT * (newest_s - old_s)
        self._num_declined = 0
