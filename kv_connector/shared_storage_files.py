"""A block as a file in a folder that several nodes mount.

    <folder>/3f/3fa0...-exact-float32-0-3             a block: its header, zeros up to a page, its payload
    <folder>/00/00.0c5d....tmp                        one being written: aside, and renamed when it is whole

What is being written lies in one folder, since file systems are slow to make files in many.

Readers see all of a block or nothing, without a lock, on NFS as well. Names are made of hashes and layouts, never of a
request's text. Links are not followed, what is not ours is not touched, and of a file that is read nothing is
believed: neither its size, nor that it stays as it is.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.store_reading import PAGE_BYTES
from kvasir.kv_connector.stored import before_payload

ALIGNMENT = PAGE_BYTES  # whole pages are copied faster

_BLOCK = re.compile(r"[0-9a-f]{64}(-[0-9a-z]+){1,8}")
_ASIDE_FOLDER = "00"
_ASIDE = re.compile(r"[0-9a-f]{2}\.[0-9a-f]{32}\.tmp")
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not hold us up
_STATUS_BLOCK_BYTES = 512  # what stat counts in
_MAX_UNNOTED_S = 300.0
_NO_FILE = (FileNotFoundError, NotADirectoryError)
_NO_FILE_OF_OURS = (errno.ELOOP, errno.ENXIO)  # a link, a socket


@dataclass(frozen=True, slots=True)
class FoundFile:
    name: str
    num_bytes: int  # that the disk has for it
    used_s: float  # when it was written or read last, about
    is_block: bool  # else one that is being written, or was


class BlockFolder:
    """All calls block, and raise OSError."""

    def __init__(self, path: Path, ttl_s: float) -> None:
        self.path = path
        self._start = f"{path}/"  # as text: to put paths together costs more than to open them
        self._ttl_s = ttl_s
        self._unnoted_s = min(ttl_s / 8, _MAX_UNNOTED_S)  # a use so soon after the one before is not noted

    def prepare(self) -> None:
        """Make it if it is not there. ValueError if it is somebody else's; others' right to look into it is taken."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{self.path} is no folder, or a link to one")
        if status.st_uid != os.geteuid():
            raise ValueError(f"{self.path} belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) != 0o700:
            self.path.chmod(0o700)

    def has(self, key: StoreKey) -> bool:
        with suppress(*_NO_FILE), self._subfolder(key) as folder:
            status = os.stat(key, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and not self.is_old(status.st_mtime):
                self._note_use(status, key, folder)
                return True
        return False

    def read(self, key: StoreKey, into: memoryview) -> int | None:
        """How many bytes of `into` it fills; None if it is not there; 0 if it is none of ours."""
        try:
            with self._subfolder(key) as folder, _Open(os.open(key, os.O_RDONLY | _OPEN, dir_fd=folder)) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_size > into.nbytes:
                    return 0
                if self.is_old(status.st_mtime):
                    return None
                self._note_use(status, file)
                return _read_all(file, into[: status.st_size])
        except _NO_FILE:
            return None
        except OSError as error:
            if error.errno in _NO_FILE_OF_OURS:
                return 0
            raise

    def write(self, key: StoreKey, frame: Frame, instead_of: str | None = None) -> None:
        """instead_of: a block that has to go. What the disk has for it is written over, which costs much less.

        Whoever is reading that one at the moment will see that it does not match its checksum.
        """
        parts = [memoryview(before_payload(frame, ALIGNMENT)), frame.payload]
        num_bytes, aside = sum(part.nbytes for part in parts), f"{_ASIDE_FOLDER}.{os.urandom(16).hex()}.tmp"
        with self._subfolder(aside, is_made=True) as beside, self._subfolder(key, is_made=True) as folder:
            try:
                taken_over = self._take_over(instead_of, aside, beside) if instead_of else None
                with _Open(_create(aside, beside) if taken_over is None else taken_over) as file:
                    _write_all(file, parts)
                    if taken_over is not None:
                        os.ftruncate(file, num_bytes)
                os.rename(aside, key, src_dir_fd=beside, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(aside, dir_fd=beside)
                raise

    def remove(self, name: str) -> None:
        """A block, or what was to become one. A folder of that name is somebody else's."""
        with suppress(*_NO_FILE, IsADirectoryError), self._subfolder(name) as folder:
            os.unlink(name, dir_fd=folder)

    def found(self) -> Iterator[FoundFile]:
        """Everything of ours, in no order. What changes meanwhile may be missing, or there no more."""
        with suppress(*_NO_FILE), os.scandir(self.path) as subfolders:
            for subfolder in subfolders:
                if _SUBFOLDER.fullmatch(subfolder.name):
                    with suppress(*_NO_FILE):
                        yield from self._found_in(subfolder.name)

    def used_s(self, name: str) -> float | None:
        """When a block was written or read last, about; None if it is not there."""
        with suppress(*_NO_FILE), self._subfolder(name) as folder:
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
        return None

    def is_old(self, used_s: float) -> bool:
        """Also what claims to be of a later time: another machine's clock, or nonsense."""
        return abs(time.time() - used_s) > self._ttl_s

    def free_bytes(self) -> int:
        """Of the disk."""
        status = os.statvfs(self.path.parent)
        return status.f_bavail * status.f_frsize

    def _found_in(self, subfolder: str) -> Iterator[FoundFile]:
        with self._subfolder(subfolder) as folder, os.scandir(folder) as entries:
            for entry in entries:
                is_block = _BLOCK.fullmatch(entry.name) is not None
                if not (is_block or _ASIDE.fullmatch(entry.name)) or entry.name[:2] != subfolder:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(status.st_mode):
                        num_bytes = status.st_blocks * _STATUS_BLOCK_BYTES
                        yield FoundFile(entry.name, num_bytes, status.st_mtime, is_block)

    def _subfolder(self, name: str, is_made: bool = False) -> "_Open":
        """The folder in which a file of that name lies."""
        if not (_BLOCK.fullmatch(name) or _ASIDE.fullmatch(name) or _SUBFOLDER.fullmatch(name)):
            raise ValueError(f"not the name of a stored block: {name!r}")
        path, flags = self._start + name[:2], os.O_RDONLY | os.O_DIRECTORY | _OPEN
        try:
            return _Open(os.open(path, flags))
        except FileNotFoundError:
            if not is_made:
                raise
            # Never the parents: under a mount point that is not mounted, blocks would fill the wrong disk.
            for folder in (self.path, Path(path)):
                if not folder.is_dir():
                    folder.mkdir(mode=0o700, exist_ok=True)
            return _Open(os.open(path, flags))

    def _take_over(self, name: str, aside: str, folder: int) -> int | None:
        """That block under another name, open for writing; None if it has gone, or has a second name."""
        try:
            with self._subfolder(name) as old:
                os.utime(name, dir_fd=old, follow_symlinks=False)  # in use: nobody else's to remove
                os.rename(name, aside, src_dir_fd=old, dst_dir_fd=folder)
            file = os.open(aside, os.O_WRONLY | _OPEN, dir_fd=folder)
        except _NO_FILE:
            return None
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.fchmod(file, 0o600)
            return file
        os.close(file)
        os.unlink(aside, dir_fd=folder)
        return None

    def _note_use(self, status: os.stat_result, file: int | str, folder: int | None = None) -> None:
        if abs(time.time() - status.st_mtime) > self._unnoted_s:
            with suppress(OSError):  # read-only, maybe
                if folder is None:
                    os.utime(file)
                else:
                    os.utime(file, dir_fd=folder, follow_symlinks=False)


class _Open:
    """A descriptor until the end of a `with`. Not made of a generator, which takes as long as opening a file."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _create(name: str, folder: int) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        num_written = os.writev(file, parts)
        while parts and num_written >= parts[0].nbytes:
            num_written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][num_written:]


def _read_all(file: int, into: memoryview) -> int:
    num_read = 0
    while num_read < into.nbytes and (num_more := os.readv(file, [into[num_read:]])):
        num_read += num_more
    return num_read
