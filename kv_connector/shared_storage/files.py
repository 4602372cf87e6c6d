"""Blocks as files of one open folder.

    <folder>/3fa0...-exact-float32-0-3        a block: its header, zeros up to a page, its payload
    <folder>/0c5d....17.tmp                   a block that is being written; renamed when it is whole

Readers see a whole block or none, without locks, on NFS too. Links are not followed, and files of other users are left
alone. Nothing about a file is trusted while it is read: not its size, nor that it stays as it is.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.descriptors import Descriptor, read_all, write_all
from kvasir.kv_connector.shared_storage.ages import Ages
from kvasir.kv_connector.shared_storage.names import checked, is_block, is_ours, new_aside
from kvasir.kv_connector.store_reading import PAGE_BYTES
from kvasir.kv_connector.stored import before_payload

ALIGNMENT = PAGE_BYTES  # whole pages are copied faster
OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not block

_STATUS_BLOCK_BYTES = 512  # the unit of st_blocks
_GONE = (errno.ENOENT, errno.ESTALE)  # ESTALE: on NFS, when another machine has removed the file
_NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)  # a link, a socket, another user's file
_DAMAGED = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # reported by the disk or by the file system
_MAX_DAMAGED = 3  # unreadable files in a row; after that, it is not the files but the store


@dataclass(frozen=True, slots=True)
class FoundFile:
    name: str
    num_bytes: int  # that it takes on the disk
    used_s: float  # its mtime: roughly when it was last written or read
    is_block: bool  # else one that is, or was, being written aside


class OpenFolder:
    """What lies in the folder. All calls block, and raise OSError.

    `damaged` is kept by `BlockFolder`: the blocks that could not be read since one last could.
    """

    __slots__ = ("_ages", "_damaged", "_folder")

    def __init__(self, folder: int, ages: Ages, damaged: set[str]) -> None:
        self._folder = folder  # a descriptor
        self._ages = ages
        self._damaged = damaged

    def has(self, key: StoreKey) -> bool:
        """Whether the block is there. Asking counts as a use of it."""
        status = self._status(key)
        if status is None or not stat.S_ISREG(status.st_mode) or self._ages.is_expired(status.st_mtime):
            return False
        if self._ages.needs_touch(status.st_mtime):
            with suppress(OSError):  # a read-only mount
                os.utime(key, dir_fd=self._folder, follow_symlinks=False)
        return True

    def read(self, key: StoreKey, into: memoryview) -> int | None:
        """Read the block. Returns how many bytes of `into` it fills; None: not there; 0: not ours, or damaged."""
        try:
            with Descriptor(os.open(checked(key), os.O_RDONLY | OPEN_FLAGS, dir_fd=self._folder)) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode) or status.st_size > into.nbytes:
                    return 0
                if self._ages.is_expired(status.st_mtime):
                    return None
                if self._ages.needs_touch(status.st_mtime):
                    with suppress(OSError):  # a read-only mount
                        os.utime(file)
                num_bytes = read_all(file, into[: status.st_size])
                self._damaged.clear()
                return num_bytes
        except OSError as error:
            if error.errno in _GONE:
                return None
            if error.errno in _NOT_OURS or (error.errno in _DAMAGED and self._is_damage_of(key)):
                return 0
            raise

    def write(self, key: StoreKey, frame: Frame, instead_of: str | None = None) -> None:
        """Write a block.

        `instead_of` names a block that has to go. Its disk space is written over, which is much cheaper than removing
        one file and creating another. A process that is reading it at that moment will find a wrong checksum.
        """
        parts = [memoryview(before_payload(frame, ALIGNMENT)), frame.payload]
        num_bytes, name, aside = sum(part.nbytes for part in parts), checked(key), new_aside()
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
        """Remove a block, or one that was being written. A folder, or another user's file, of that name stays."""
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(checked(name), dir_fd=self._folder)

    def found(self) -> Iterator[FoundFile]:
        """All files of ours, in no order. What changes meanwhile may be missing, or may be gone already."""
        self._ages.compare_clocks(self._folder)
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not is_ours(entry.name):
                    continue
                status = self._status(entry.name)
                if status is not None and not stat.S_ISDIR(status.st_mode):
                    num_bytes = status.st_blocks * _STATUS_BLOCK_BYTES
                    yield FoundFile(entry.name, num_bytes, status.st_mtime, is_block(entry.name))

    def used_s(self, name: str) -> float | None:
        """Roughly when a block was last written or read; None if it is not there."""
        status = self._status(name)
        return None if status is None else status.st_mtime

    def _status(self, name: str) -> os.stat_result | None:
        """None: the file is not there, or the disk cannot say."""
        try:
            return os.stat(checked(name), dir_fd=self._folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in (*_GONE, *_DAMAGED):
                return None
            raise

    def _is_damage_of(self, key: StoreKey) -> bool:
        """Whether this file is damaged, and not the whole store: one bad block is a miss, and others are still read."""
        if len(self._damaged) < _MAX_DAMAGED:
            self._damaged.add(key)
        return key in self._damaged

    def _create(self, name: str) -> int:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600, dir_fd=self._folder)

    def _take_over(self, name: str, aside: str) -> int | None:
        """Rename that block to `aside` and open it for writing.

        None if it is gone; or if it must not be written over (another user's, or one with a second name), and then it
        has been removed, which makes room as well.
        """
        folder = self._folder
        try:
            os.utime(checked(name), dir_fd=folder, follow_symlinks=False)  # looks used, so no one else removes it
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
            file = os.open(aside, os.O_WRONLY | OPEN_FLAGS, dir_fd=folder)
        except OSError as error:
            if error.errno not in (*_GONE, *_NOT_OURS):
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
