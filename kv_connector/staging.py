"""Where an engine puts what it reads: slots of one block each, that no cache and no later owner knows of."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.one_sided_engine import Pool

_SET_ASIDE_S = 60.0  # more than any engine goes on trying
_MAX_SET_ASIDE = 8


class Staging:
    """One link's. Touched when it is made, and not when a first block comes."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self._bytes = np.full((num_slots, block_bytes), 0xFF, np.uint8)
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._has_free = asyncio.Event()
        self._has_free.set()

    @property
    def pool(self) -> Pool:
        return Pool.of(self._bytes.data)

    def slot(self, slot: int) -> memoryview:
        return memoryview(self._bytes[slot])

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def take(self, most: int) -> list[int]:
        """At least one, as soon as there is one, and neighbours if possible."""
        while not self._free:
            self._has_free.clear()
            await self._has_free.wait()
        taken, self._free = self._free[:most], self._free[most:]
        return taken

    def put_back(self, slots: Sequence[int]) -> None:
        self._free = sorted([*self._free, *slots])
        self._has_free.set()


class SetAside:
    """Stagings that an engine may still write to, since a read from a lost peer cannot be called back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stagings: list[tuple[float, Staging]] = []

    def add(self, staging: Staging) -> None:
        self._stagings.append((self._clock() + _SET_ASIDE_S, staging))

    def check_room(self) -> None:
        """Memory is bounded, however often peers are lost in mid-read."""
        self._stagings = [(until_s, staging) for until_s, staging in self._stagings if until_s > self._clock()]
        if len(self._stagings) >= _MAX_SET_ASIDE:
            raise KVTransferError(f"{_MAX_SET_ASIDE} peers were lost in mid-read lately; none is read from for a while")
