"""Reading values from a store on threads. If the store makes its readers wait, they read ahead of the caller.

Values are read into trays, buffers with room for many values, so that handing them from thread to thread is cheap for
small blocks too. The number of trays bounds the memory, however many fetches run and however slowly their blocks are
taken in. If blocks land on the reading threads, they all pass through the first place of a tray, which so stays in the
CPU's cache.
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
_FIRST_BYTES = 1 << 20  # of a fetch's first tray; each following one is used for twice as many
_MAX_TRAYS_BYTES = 64 << 20
_NUM_AHEAD = 2  # trays that a fetch may read ahead, if the store makes its readers wait

Sizes = Generator[tuple[int, int | None], None, None]

# Reads the values of some keys, each into its place. Yields, in any order, the index of a key and how many bytes of its
# place the value fills, or None if there is none. A place is not written to any more once the next item is asked for.
ReadValues = Callable[[Job[list[Frame | None]], Sequence[StoreKey], Sequence[memoryview]], Sizes]


class Trays:
    """A bounded number of buffers, each with room for `num_values` values. Made when first needed, and then kept."""

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
    """Implements a store's `fetch`, given a function that reads some of its values.

    A store whose readers mostly wait is read by several threads at once. If they mostly compute, one works at a time:
    two would only take turns, which costs more than it gives. The first tray, a small one, shows which it is.
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
                job.call_off()  # nothing may land any more
                if job.done.done():
                    trays.put_back(tray)
                else:
                    job.done.add_done_callback(lambda _, tray=tray: trays.put_back(tray))  # type: ignore[misc]

    def _read_some(
        self, job: Job[list[Frame | None]], keys: Sequence[StoreKey], tray: memoryview, land: Land | None
    ) -> list[Frame | None]:
        """Runs on a thread. A tray is reused once its frames have been taken in and its thread is done."""
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
