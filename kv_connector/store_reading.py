"""Reading ahead from a store: while some blocks are taken in, the next ones are read, into memory that is used again.

Values are read by trays: enough of them at once that handing over is cheap for small blocks too. However many fetches
run, however slowly their blocks are taken in, the trays are all the memory there is.
"""

import asyncio
import mmap
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import islice

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.store_threads import Job
from kvasir.kv_connector.stored import split

PAGE_BYTES = 4096
_TRAY_BYTES = 8 << 20
_FIRST_BYTES = 1 << 20  # of a fetch: others follow while it is taken in, twice as many each time
_MAX_TRAYS_BYTES = 64 << 20
_NUM_AHEAD = 2  # trays a fetch may have on their way, besides the one that is taken in


class Trays:
    """A bounded number of buffers, made when they are first needed and kept. Each has room for `num_values` values."""

    def __init__(self, max_value_bytes: int) -> None:
        self.place_bytes = -(-max_value_bytes // PAGE_BYTES) * PAGE_BYTES
        self.num_values = max(1, _TRAY_BYTES // self.place_bytes)
        self.num_first = max(1, _FIRST_BYTES // self.place_bytes)
        most = max(_NUM_AHEAD, _MAX_TRAYS_BYTES // (self.num_values * self.place_bytes))
        self._left = asyncio.Semaphore(most)
        self._free: list[memoryview] = []

    async def take(self) -> memoryview:
        await self._left.acquire()
        return self._free.pop() if self._free else self._make()

    @property
    def is_one_free(self) -> bool:
        return not self._left.locked()

    def put_back(self, tray: memoryview) -> None:
        self._free.append(tray)  # the one used last is used next: it is in the processor's cache
        self._left.release()

    def places(self, tray: memoryview) -> list[memoryview]:
        return [tray[start : start + self.place_bytes] for start in range(0, tray.nbytes, self.place_bytes)]

    def _make(self) -> memoryview:
        tray = memoryview(mmap.mmap(-1, self.num_values * self.place_bytes))
        tray[::PAGE_BYTES] = bytes(len(tray[::PAGE_BYTES]))  # touched now, and not while values are read
        return tray


# Read these values into that tray: for each its size at its place, or None if there is none.
StartReading = Callable[[Sequence[StoreKey], memoryview], Job[list[int | None]]]


async def read_ahead(
    keys: Sequence[StoreKey], trays: Trays, start: StartReading, alignment: int
) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
    """What a store's `fetch` yields. A tray is used again when its frames have been taken in and its thread is done."""
    waiting, num_next = iter(keys), trays.num_first
    ahead: deque[tuple[list[StoreKey], memoryview, Job[list[int | None]]]] = deque()
    try:
        while True:
            while len(ahead) <= _NUM_AHEAD and (not ahead or trays.is_one_free):
                if not (some := list(islice(waiting, num_next))):
                    break
                num_next = min(2 * num_next, trays.num_values)
                tray = await trays.take()
                ahead.append((some, tray, start(some, tray)))
            if not ahead:
                return
            some, tray, job = ahead[0]
            sizes = await asyncio.shield(job.done)
            for key, size, place in zip(some, sizes, trays.places(tray), strict=False):
                yield key, None if size is None else split(place[:size], alignment)
            ahead.popleft()
            trays.put_back(tray)
    finally:
        for _, tray, job in ahead:
            job.call_off()
            if job.done.done():
                trays.put_back(tray)
            else:
                job.done.add_done_callback(lambda _, tray=tray: trays.put_back(tray))  # type: ignore[misc]
