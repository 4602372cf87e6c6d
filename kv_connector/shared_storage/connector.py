"""A folder that several nodes mount, as a store: one file per block; the longest unused make room for new ones.

The file system may be full, read-only, unmounted, slow, or hang. So it is called on threads that nothing waits for when
they hang, except `put`: its payloads must not be reused while a thread may still read them.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockSource, Frame, Land, StoreKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage.files import ALIGNMENT
from kvasir.kv_connector.shared_storage.folder import BlockFolder
from kvasir.kv_connector.shared_storage.quota import Quota
from kvasir.kv_connector.store_reading import Sizes, StoreReader, Trays
from kvasir.kv_connector.stored import max_stored_bytes
from kvasir.kv_connector.threads import Job, Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_INTERVAL_S = 60.0
_NUM_MOVING = 8  # threads that move blocks
_NUM_ASKING = 4  # threads for short questions, so that these do not wait for blocks
_NUM_WRITING = 2  # more threads for one `put` whose first one mostly waits for the storage


class SharedStorageConnector:
    name = "shared_storage"
    is_store: Literal[True] = True

    def __init__(self, settings: ConnectorSettings) -> None:
        if not settings.path:
            raise ValueError("the connector shared_storage needs a path")
        self._folder = BlockFolder(Path(settings.path) / "blocks", settings.store_ttl_s)
        self._quota = Quota(self._folder, settings.kv_quota_bytes)
        self._max_quota_bytes = settings.kv_quota_bytes
        self._look_interval_s = min(_LOOK_INTERVAL_S, settings.store_ttl_s)
        self._moving = Threads(_NUM_MOVING, "kv-storage")
        self._asking = Threads(_NUM_ASKING, "kv-storage-ask")
        self._reader: StoreReader | None = None
        self._looks: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        max_bytes = max_stored_bytes(max_payload_bytes, ALIGNMENT)
        if self._max_quota_bytes is not None and max_bytes > self._max_quota_bytes:
            raise ValueError(f"a quota of {self._max_quota_bytes} bytes holds no block of {max_bytes}")
        self._reader = StoreReader(self._moving, Trays(max_bytes), ALIGNMENT, self._read)
        try:
            await self._ask(self._folder.prepare)
        except KVTransferError as error:
            log.warning("not ready yet: %s", error)
        self._looks = asyncio.create_task(self._look_now_and_then())

    async def close(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
        self._moving.stop()
        self._asking.stop()

    @property
    def endpoint(self) -> str:
        return ""

    async def put(self, frames: Iterable[tuple[StoreKey, Frame]]) -> None:
        waiting = _Shared(frames)
        jobs = [self._moving.start(self._write, waiting, 1)]
        try:
            with _transfer_errors():
                await jobs[0].outcome()
                num_more = _NUM_WRITING if jobs[0].has_waited else 1
                jobs += [self._moving.start(self._write, waiting) for _ in range(num_more)]
                for job in jobs[1:]:
                    await job.outcome()
        finally:
            for job in jobs:
                job.call_off()
            for job in jobs:
                await job.settled()  # nothing reads the payloads any more
            if self._quota.wants_a_look:
                self._look_now.set()

    async def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        def look() -> list[bool]:
            try:
                with self._folder.opened() as folder:
                    return [folder.has(key) for key in keys]
            except FileNotFoundError:
                return [False] * len(keys)

        return await self._ask(look)

    def fetch(
        self, keys: Sequence[StoreKey], *, land: Land | None = None
    ) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        assert self._reader is not None, "opened"
        return self._reader.fetch(keys, land)

    def _read(self, job: Job[Any], keys: Sequence[StoreKey], places: Sequence[memoryview]) -> Sizes:
        with _transfer_errors(), suppress(FileNotFoundError), self._folder.opened() as folder:
            for index, (key, place) in enumerate(zip(keys, places, strict=True)):
                job.check()
                yield index, folder.read(key, place)

    async def discard(self, keys: Sequence[StoreKey]) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError), self._folder.opened() as folder:
                for key in keys:
                    folder.remove(key)

        await self._ask(remove)

    async def _ask(self, function: Callable[[], T]) -> T:
        def call(job: Job[T]) -> T:
            return function()

        with _transfer_errors():
            return await self._asking.start(call).outcome()

    def _write(self, job: Job[None], frames: "_Shared[tuple[StoreKey, Frame]]", most: int | None = None) -> None:
        with self._folder.opened(create=True) as folder:
            for key, frame in islice(frames, most):
                job.check()
                folder.write(key, frame, self._quota.make_room(folder, frame.payload.nbytes + ALIGNMENT))

    async def _look_now_and_then(self) -> None:
        while True:
            self._look_now.clear()
            try:
                await self._ask(self._quota.look)
            except KVTransferError as error:
                log.debug("no look at what is stored: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_interval_s):
                    await self._look_now.wait()


@contextmanager
def _transfer_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KVTransferError(f"shared storage: {error}") from error


class _Shared(Iterator[T]):
    """An iterator that several threads may take from."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)
