"""A folder that several nodes mount: one file a block, written aside and renamed.

    <path>/blocks/3f/3fa0...-none-float32-0-3          folders 0700, files 0600

A name is made of a hash in hex and the layout, never of a request's text. All calls that may block run in threads.
"""

import asyncio
import errno
import logging
import os
import re
import stat
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockSource, Frame, StoreKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.stored import before_payload, max_stored_bytes, split

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_NAME = re.compile(r"[0-9a-z]{64}(-[0-9a-z]+){4}")
_ASIDE = re.compile(r"\.[0-9a-f]{32}\.tmp")
_ASIDE_MAX_AGE_S = 600.0  # what a writer that died has left
_SWEEP_INTERVAL_S = 60.0
_NUM_THREADS = 4
_NUM_BUFFERS = 3  # one being taken in, two being read


class SharedStorageConnector:
    name = "shared_storage"
    is_store: Literal[True] = True

    def __init__(self, settings: ConnectorSettings) -> None:
        if not settings.path:
            raise ValueError("the connector shared_storage needs a path")
        self._folder = Path(settings.path) / "blocks"
        self._ttl_s = settings.store_ttl_s
        self._max_file_bytes = 0
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-storage")
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        self._max_file_bytes = max_stored_bytes(max_payload_bytes, 4096)
        try:
            await self._in_thread(os.makedirs, self._folder, mode=0o700, exist_ok=True)
        except KVTransferError as error:
            log.warning("%s is not there yet: %s", self._folder, error)
        self._sweeper = asyncio.create_task(self._sweep_now_and_then())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def endpoint(self) -> str:
        return ""

    async def put(self, frames: Sequence[tuple[StoreKey, Frame]]) -> None:
        is_cancelled = threading.Event()

        def write_all() -> None:
            for key, frame in frames:
                if not is_cancelled.is_set():
                    _write(self._path(key), frame)

        writing = asyncio.create_task(self._in_thread(write_all))
        try:
            await asyncio.shield(writing)
        finally:  # also when cancelled: the thread reads the payloads until it has ended
            is_cancelled.set()
            await asyncio.wait({writing})

    async def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        return await self._in_thread(lambda: [self._path(key).is_file() for key in keys])

    async def fetch(self, keys: Sequence[StoreKey]) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        waiting = iter(keys)
        free = [bytearray(self._max_file_bytes) for _ in range(min(_NUM_BUFFERS, len(keys)))]
        ahead: deque[tuple[StoreKey, bytearray, asyncio.Task[int | None]]] = deque()
        try:
            while True:
                while free and (key := next(waiting, None)) is not None:
                    buffer = free.pop()
                    reading = asyncio.create_task(self._in_thread(_read, self._path(key), buffer))
                    ahead.append((key, buffer, reading))
                if not ahead:
                    return
                key, buffer, reading = ahead.popleft()
                num_bytes = await reading
                yield key, None if num_bytes is None else split(memoryview(buffer)[:num_bytes], 4096)
                free.append(buffer)
        finally:
            for _, _, reading in ahead:
                reading.cancel()  # its thread may read on, into a buffer that nobody looks at

    async def discard(self, keys: Sequence[StoreKey]) -> None:
        def remove() -> None:
            for key in keys:
                self._path(key).unlink(missing_ok=True)

        await self._in_thread(remove)

    def _path(self, key: StoreKey) -> Path:
        if not _NAME.fullmatch(key):
            raise ValueError(f"not the name of a stored block: {key!r}")
        return self._folder / key[:2] / key

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))
        except OSError as error:
            raise KVTransferError(f"shared storage: {error}") from error

    async def _sweep_now_and_then(self) -> None:
        while True:
            try:
                await self._in_thread(_sweep, self._folder, self._ttl_s)
            except KVTransferError as error:
                log.debug("no sweep: %s", error)
            await asyncio.sleep(min(_SWEEP_INTERVAL_S, self._ttl_s))


def _write(path: Path, frame: Frame) -> None:
    """Aside, under a name that no other writer has, and then renamed: readers see all of it or nothing."""
    aside = path.parent / f".{uuid.uuid4().hex}.tmp"
    descriptor = _create(aside)
    try:
        try:
            _write_all(descriptor, [memoryview(before_payload(frame, 4096)), frame.payload])
        finally:
            os.close(descriptor)
        os.rename(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        # Never the parents: under a mount point that is not mounted, blocks would fill the wrong disk.
        for folder in (path.parent.parent, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    while parts:
        num_written = os.writev(descriptor, parts)
        while parts and num_written >= parts[0].nbytes:
            num_written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][num_written:]


def _read(path: Path, buffer: bytearray) -> int | None:
    """How many bytes of it are in `buffer` now; None if there is no such file; 0 if it is none of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link
            return 0
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > len(buffer):
            return 0
        rest, num_read = memoryview(buffer), 0
        while num_read < status.st_size and (n := os.readv(descriptor, [rest[num_read : status.st_size]])):
            num_read += n
        return num_read
    finally:
        os.close(descriptor)


def _sweep(folder: Path, ttl_s: float) -> None:
    """Remove what is over its time to live, and what writers that died have left; nobody else's files."""
    now_s = time.time()
    for entry in folder.glob("[0-9a-f][0-9a-f]/*"):
        is_ours, max_age_s = (
            (True, ttl_s) if _NAME.fullmatch(entry.name) else (bool(_ASIDE.fullmatch(entry.name)), _ASIDE_MAX_AGE_S)
        )
        try:
            if is_ours and now_s - entry.lstat().st_mtime > max_age_s:
                entry.unlink()
        except FileNotFoundError:
            continue  # another node was faster
