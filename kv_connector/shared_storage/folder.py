"""The folder of blocks that several nodes mount: where it is, and that it is this user's own."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvasir.kv_connector.descriptors import Descriptor
from kvasir.kv_connector.shared_storage.ages import Ages
from kvasir.kv_connector.shared_storage.files import OPEN_FLAGS, OpenFolder


class BlockFolder:
    """All calls block, and raise OSError."""

    def __init__(self, path: Path, ttl_s: float) -> None:
        self.path = path
        self.ages = Ages(ttl_s)
        self._damaged: set[str] = set()
        self._device: int | None = None  # st_dev of the file system that the folder was last seen on

    def prepare(self) -> None:
        """Create the folder if it is not there. ValueError if it is another user's; others lose access to ours."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{self.path} is no folder, or a link to one")
        if status.st_uid != os.geteuid():
            raise ValueError(f"{self.path} belongs to user {status.st_uid}, and this is user {os.geteuid()}")
        with self.opened():
            """It can be used."""

    @contextmanager
    def opened(self, create: bool = False) -> Iterator[OpenFolder]:
        """For some calls that all reach the same folder, whatever is mounted at its path meanwhile."""
        with Descriptor(self._open(create)) as folder:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"belongs to user {status.st_uid}", str(self.path))
            if stat.S_IMODE(status.st_mode) != 0o700:
                with suppress(OSError):  # a read-only mount
                    os.fchmod(folder, 0o700)
            self._device = status.st_dev
            yield OpenFolder(folder, self.ages, self._damaged)

    def free_bytes(self) -> int:
        """Of the disk."""
        status = os.statvfs(self.path.parent)
        return status.f_bavail * status.f_frsize

    def _open(self, create: bool) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | OPEN_FLAGS
        try:
            return os.open(self.path, flags)
        except FileNotFoundError:
            # Create neither its parents, nor the folder on another device: if the mount is gone, blocks would fill the
            # disk below it.
            if not create or self._device not in (None, self.path.parent.stat().st_dev):
                raise
            self.path.mkdir(mode=0o700, exist_ok=True)
            return os.open(self.path, flags)
