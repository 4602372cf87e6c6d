"""Reading from a store, on threads; ahead where it makes them wait: while some blocks are taken in, others are read.

Values are read by trays: enough of them at once that handing over is cheap for small blocks too. However many fetches
run, however slowly their blocks are taken in, the trays are all the memory there is. Where blocks land on the threads,
they all pass through the same place of a tray, which so stays in the processor's cache.
"""

import asyncio
import mmap
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from itertools import islice

from kvasir.kv_connector.base import Frame, Land, StoreKey
from kvasir.kv_connector.stored import split
from kvasir.kv_connector.threads import Job, Threads

PAGE_BYTES = 4096
_TRAY_BYTES = 8 << 20
_FIRST_BYTES = 1 << 20  # of a fetch: others follow, twice as many each time
_MAX_TRAYS_BYTES = 64 << 20
_NUM_AHEAD = 2  # trays a fetch may have on their way, besides the next one, where a store makes its readers wait

Sizes = Generator[tuple[int, int | None], None, None]

# Read the values of some keys: for each its index, in any order, and how many bytes of its place it fills; None if
# there is none. A place is not written to any more when the next one is asked for.
ReadValues = Callable[[Job[list[Frame | None]], Sequence[StoreKey], Sequence[memoryview]], Sizes]


class Trays:
    """A bounded number of buffers, made when they are first needed and kept. Each has room for `num_values` values."""

    def __init__(self, max_value_bytes: int) -> None:
        self._place_bytes = -(-max_value_bytes // PAGE_BYTES) * PAGE_BYTES
        self.num_values = max(1, _TRAY_BYTES // self._place_bytes)
        self.num_first = max(1, _FIRST_BYTES // self._place_bytes)
        most = max(_NUM_AHEAD, _MAX_TRAYS_BYTES // (self.num_values * self._place_bytes))
        self._left = asyncio.Semaphore(most)
        self._free: list[memoryview] = []

    async def take(self) -> memoryview:
        await self._left.acquire()
        return self._free.pop() if self._free else memoryview(mmap.mmap(-1, self.num_values * self._place_bytes))

    @property
    def is_one_free(self) -> bool:
        return not self._left.locked()

    def put_back(self, tray: memoryview) -> None:
        self._free.append(tray)  # the one used last is used next
        self._left.release()

    def places(self, tray: memoryview, num_values: int, is_one_enough: bool) -> list[memoryview]:
        starts = [0 if is_one_enough else index * self._place_bytes for index in range(num_values)]
        return [tray[start : start + self._place_bytes] for start in starts]


class StoreReader:
    """What a store's `fetch` does, given how to read some of its values.

    One thread after the other where they compute all the time: two would take turns, which costs more than it gives.
    The first tray, a small one, shows it.
    """

    def __init__(self, threads: Threads, trays: Trays, alignment: int, read: ReadValues) -> None:
        self._threads = threads
        self._trays = trays
        self._alignment = alignment
        self._read = read

    async def fetch(self, keys: Sequence[StoreKey], land: Land | None) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        trays, waiting, num_next = self._trays, iter(keys), self._trays.num_first
        num_ahead = 0
        ahead: deque[tuple[list[StoreKey], memoryview, Job[list[Frame | None]]]] = deque()
        try:
            while True:
                while len(ahead) <= num_ahead and (not ahead or trays.is_one_free):
                    if not (some := list(islice(waiting, num_next))):
                        break
                    num_next = min(2 * num_next, trays.num_values)
                    tray = await trays.take()
                    ahead.append((some, tray, self._threads.start(self._read_some, some, tray, land)))
                if not ahead:
                    return
                some, tray, job = ahead[0]
                frames = await asyncio.shield(job.done)
                num_ahead = _NUM_AHEAD if job.has_waited else 0
                for item in zip(some, frames, strict=True):
                    yield item
                ahead.popleft()
                trays.put_back(tray)
        finally:
            for _, tray, job in ahead:
                job.call_off()  # so that nothing lands any more
                if job.done.done():
                    trays.put_back(tray)
                else:
                    job.done.add_done_callback(lambda _, tray=tray: trays.put_back(tray))  # type: ignore[misc]

    def _read_some(
        self, job: Job[list[Frame | None]], keys: Sequence[StoreKey], tray: memoryview, land: Land | None
    ) -> list[Frame | None]:
        """On a thread. A tray is used again when its frames have been taken in and its thread is done."""
        frames: list[Frame | None] = [None] * len(keys)
        places = self._trays.places(tray, len(keys), is_one_enough=land is not None)
        with closing(self._read(job, keys, places)) as sizes:
            for index, size in sizes:
                if size is None:
                    continue
                frames[index] = frame = split(places[index][:size], self._alignment)
                if land is not None:
                    with job.wanted():
                        land(keys[index], frame)
        return frames
