"""Where an engine puts what it reads: slots of one block each, that no cache and no later owner knows of."""

import asyncio
from collections.abc import Sequence

import numpy as np

from kvasir.kv_connector.one_sided_engine import Pool

_never_freed: list["Staging"] = []


class Staging:
    """One link's. Touched when it is made, and not when a first block comes."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self._bytes = np.full((num_slots, block_bytes), 0xFF, np.uint8)
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self.has_free = asyncio.Event()
        self.has_free.set()

    @property
    def pool(self) -> Pool:
        return Pool.of(self._bytes.data)

    def slot(self, slot: int) -> memoryview:
        return memoryview(self._bytes[slot])

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, most: int) -> list[int]:
        """What there is, neighbours if possible."""
        taken, self._free = self._free[:most], self._free[most:]
        if not self._free:
            self.has_free.clear()
        return taken

    def put_back(self, slots: Sequence[int]) -> None:
        self._free = sorted([*self._free, *slots])
        self.has_free.set()

    def keep_for_ever(self) -> None:
        """Somebody may still write here, and nobody can say until when."""
        _never_freed.append(self)
