"""A block as a file in a folder that several nodes mount.

    <folder>/3fa0...-exact-float32-0-3        a block: its header, zeros up to a page, its payload
    <folder>/0c5d....17.tmp                   one being written: aside, and renamed when it is whole

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.descriptors import Descriptor, read_all, write_all
from kvasir.kv_connector.store_reading import PAGE_BYTES
from kvasir.kv_connector.stored import before_payload

ALIGNMENT = PAGE_BYTES  # whole pages are copied faster

_BLOCK = re.compile(r"[0-9a-f]{64}(-[0-9a-z]+){1,8}")
_ASIDE = re.compile(r"[0-9a-f]{32}\.[0-9]{1,18}\.tmp")
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not hold us up
_STATUS_BLOCK_BYTES = 512  # what stat counts in
_MAX_UNNOTED_S = 300.0
_GONE = (errno.ENOENT, errno.ESTALE)  # the second from NFS, of a file that another machine has removed
_NONE_OF_OURS = (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)  # a link, a socket, another user's
_DAMAGED = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # by the disk, or by the file system
_MAX_DAMAGED = 3  # files, and none that can be read: more, and it is not the files


@dataclass(frozen=True, slots=True)
class FoundFile:
    name: str
    num_bytes: int  # that the disk has for it
    used_s: float  # when it was written or read last, about
    is_block: bool  # else one that is being written, or was


class BlockFolder:
    """Where it is, and whose. All calls block, and raise OSError."""

    def __init__(self, path: Path, ttl_s: float) -> None:
        self.path = path
        self.ttl_s = ttl_s
        self.unnoted_s = min(ttl_s / 8, _MAX_UNNOTED_S)  # a use so soon after the one before is not noted
        self.damaged: set[str] = set()  # what could not be read, since the last one that could
        self._disk: int | None = None  # that it was on
        self._clock_ahead_s = 0.0  # of the disk's server, to ours
        self._asides = map(f"{os.urandom(16).hex()}.{{}}.tmp".format, count())

    def prepare(self) -> None:
        """Make it if it is not there. ValueError if it is somebody else's; others' right to look into it is taken."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{self.path} is no folder, or a link to one")
        if status.st_uid != os.geteuid():
            raise ValueError(f"{self.path} belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        with self.opened():
            """It can be used."""

    @contextmanager
    def opened(self, is_made: bool = False) -> Iterator["OpenFolder"]:
        """For some calls, which all go to the same folder whatever becomes of its path."""
        with Descriptor(self._open(is_made)) as folder:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}", str(self.path))
            if stat.S_IMODE(status.st_mode) != 0o700:
                with suppress(OSError):  # read-only, maybe
                    os.fchmod(folder, 0o700)
            self._disk = status.st_dev
            yield OpenFolder(self, folder)

    def new_aside(self) -> str:
        return next(self._asides)

    def age_s(self, used_s: float) -> float:
        """By the clock that files get their times from. Below zero where it was set back since, or of nonsense."""
        return time.time() + self._clock_ahead_s - used_s

    def is_old(self, used_s: float) -> bool:
        return abs(self.age_s(used_s)) > self.ttl_s

    def compare_clocks(self, folder: int) -> None:
        """A machine whose clock is wrong takes no block of the others' for an old one."""
        with suppress(OSError):  # read-only, maybe
            os.utime(folder)
            self._clock_ahead_s = os.fstat(folder).st_mtime - time.time()

    def free_bytes(self) -> int:
        """Of the disk."""
        status = os.statvfs(self.path.parent)
        return status.f_bavail * status.f_frsize

    def _open(self, is_made: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
        try:
            return os.open(self.path, flags)
        except FileNotFoundError:
            # Neither its parents nor on another disk: where a mount has gone, blocks would fill the one below.
            if not is_made or self._disk not in (None, self.path.parent.stat().st_dev):
                raise
            self.path.mkdir(mode=0o700, exist_ok=True)
            return os.open(self.path, flags)


class OpenFolder:
    """What lies in it. All calls block, and raise OSError."""

    __slots__ = ("_folder", "_of")

    def __init__(self, of: BlockFolder, folder: int) -> None:
        self._of = of
        self._folder = folder

    def has(self, key: StoreKey) -> bool:
        status = self._status(key)
        if status is None or not stat.S_ISREG(status.st_mode) or self._of.is_old(status.st_mtime):
            return False
        if self._is_to_be_noted(status):
            with suppress(OSError):  # read-only, maybe
                os.utime(key, dir_fd=self._folder, follow_symlinks=False)
        return True

    def read(self, key: StoreKey, into: memoryview) -> int | None:
        """How many bytes of `into` it fills; None if it is not there; 0 if it is none of ours, or damaged."""
        try:
            with Descriptor(os.open(_checked(key), os.O_RDONLY | _OPEN, dir_fd=self._folder)) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_size > into.nbytes:
                    return 0
                if self._of.is_old(status.st_mtime):
                    return None
                if self._is_to_be_noted(status):
                    with suppress(OSError):  # read-only, maybe
                        os.utime(file)
                num_bytes = read_all(file, into[: status.st_size])
                self._of.damaged.clear()
                return num_bytes
        except OSError as error:
            if error.errno in _GONE:
                return None
            if error.errno in _NONE_OF_OURS or (error.errno in _DAMAGED and self._is_damage_of(key)):
                return 0
            raise

    def _is_damage_of(self, key: StoreKey) -> bool:
        """Of the file, not of all there is: one bad block is one miss, and no reason to do without the others."""
        damaged = self._of.damaged
        if len(damaged) < _MAX_DAMAGED:
            damaged.add(key)
        return key in damaged

    def write(self, key: StoreKey, frame: Frame, instead_of: str | None = None) -> None:
        """instead_of: a block that has to go. What the disk has for it is written over, which costs much less.

        Whoever is reading that one at the moment will see that it does not match its checksum.
        """
        parts = [memoryview(before_payload(frame, ALIGNMENT)), frame.payload]
        num_bytes, name, aside = sum(part.nbytes for part in parts), _checked(key), self._of.new_aside()
        try:
            taken_over = self._take_over(instead_of, aside) if instead_of else None
            with Descriptor(self._create(aside) if taken_over is None else taken_over) as file:
                write_all(file, parts)
                if taken_over is not None:
                    os.ftruncate(file, num_bytes)
            os.rename(aside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(aside, dir_fd=self._folder)
            raise

    def remove(self, name: str) -> None:
        """A block, or what was to become one. A folder of that name is somebody else's, and so may a file be."""
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(_checked(name), dir_fd=self._folder)

    def found(self) -> Iterator[FoundFile]:
        """Everything of ours, in no order. What changes meanwhile may be missing, or there no more."""
        self._of.compare_clocks(self._folder)
        with os.scandir(self._folder) as entries:
            for entry in entries:
                is_block = _BLOCK.fullmatch(entry.name) is not None
                if not (is_block or _ASIDE.fullmatch(entry.name)):
                    continue
                status = self._status(entry.name)
                if status is not None and not stat.S_ISDIR(status.st_mode):
                    num_bytes = status.st_blocks * _STATUS_BLOCK_BYTES
                    yield FoundFile(entry.name, num_bytes, status.st_mtime, is_block)

    def used_s(self, name: str) -> float | None:
        """When a block was written or read last, about; None if it is not there."""
        status = self._status(name)
        return None if status is None else status.st_mtime

    def _status(self, name: str) -> os.stat_result | None:
        """None: it is not there, or nothing is known of it any more."""
        try:
            return os.stat(_checked(name), dir_fd=self._folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in (*_GONE, *_DAMAGED):
                return None
            raise

    def _is_to_be_noted(self, status: os.stat_result) -> bool:
        return abs(self._of.age_s(status.st_mtime)) > self._of.unnoted_s

    def _create(self, name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=self._folder)

    def _take_over(self, name: str, aside: str) -> int | None:
        """That block under another name, open for writing; None if it has gone, also where that is all it was good
        for: it is another user's, or has a second name."""
        folder = self._folder
        try:
            os.utime(_checked(name), dir_fd=folder, follow_symlinks=False)  # in use: nobody else's to remove
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
            file = os.open(aside, os.O_WRONLY | _OPEN, dir_fd=folder)
        except OSError as error:
            if error.errno not in (*_GONE, *_NONE_OF_OURS):
                raise
            self.remove(name)
            self.remove(aside)
            return None
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.fchmod(file, 0o600)
            return file
        os.close(file)
        os.unlink(aside, dir_fd=folder)
        return None


def _checked(name: str) -> str:
    if not (_BLOCK.fullmatch(name) or _ASIDE.fullmatch(name)):
        raise ValueError(f"not the name of a stored block: {name!r}")
    return name
