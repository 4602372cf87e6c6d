"""How much of a shared folder is used, and which blocks have to go: those unused for longest.

Every process scans the folder for itself, and none waits for another. Between two scans it does not know what the
others write. A process scans again when it has written a sixteenth of the quota, but no sooner than after a second, and
not so often that scanning takes more than a tenth of its time. For a while, each writing process may exceed the quota
by what it writes between two scans.
"""

import threading
import time
from collections import deque

from kvasir.kv_connector.shared_storage.files import FoundFile, OpenFolder
from kvasir.kv_connector.shared_storage.folder import BlockFolder

_ASIDE_MAX_AGE_S = 600.0  # then a file written aside is what a dead writer has left
_LOOK_AGAIN_SHARE = 1 / 16  # of the quota, written since the last scan
_MIN_LOOK_INTERVAL_S = 1.0
_MIN_LOOK_INTERVALS = 10  # times what the last scan took
_OLDEST_SHARE = 1 / 2  # of the quota: the oldest blocks that are remembered from a scan


class Quota:
    """Called by the threads that write."""

    def __init__(self, folder: BlockFolder, max_bytes: int | None) -> None:
        """max_bytes None: half of what, at the first scan, the disk has free plus what our blocks take."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._used_bytes = 0
        self._written_bytes = 0  # by this process, since the last scan
        self._oldest: deque[FoundFile] = deque()
        self._looked_s = float("-inf")
        self._look_again_s = float("-inf")

    @property
    def wants_a_look(self) -> bool:
        """Whether it is time to scan again. Asked on the event loop, so it takes no lock: its holder may be stuck in
        the file system."""
        if self._max_bytes is None or time.monotonic() < self._look_again_s:
            return False
        return self._written_bytes > self._max_bytes * _LOOK_AGAIN_SHARE

    def look(self) -> None:
        """Scan the folder. Expired blocks, and files that dead writers have left, are removed."""
        with self._looking:
            started_s = time.monotonic()
            with self._lock:
                written_before = self._written_bytes
            used_bytes, blocks = 0, []
            with self._folder.opened() as folder:
                for file in folder.found():
                    if self._is_over(file):
                        folder.remove(file.name)
                        continue
                    used_bytes += file.num_bytes
                    if file.is_block:
                        blocks.append(file)
            blocks.sort(key=lambda file: file.used_s)
            if self._max_bytes is None:
                self._max_bytes = (self._folder.free_bytes() + used_bytes) // 2
            with self._lock:
                self._written_bytes -= written_before
                self._used_bytes = used_bytes + self._written_bytes  # some of it may count twice, until the next scan
                self._oldest = _first(blocks, self._max_bytes * _OLDEST_SHARE)
                self._looked_s = time.monotonic()
                took_s = self._looked_s - started_s
                self._look_again_s = self._looked_s + max(_MIN_LOOK_INTERVAL_S, _MIN_LOOK_INTERVALS * took_s)

    def make_room(self, folder: OpenFolder, num_bytes: int) -> str | None:
        """Make room for a block that is about to be written.

        Removes the blocks that must go for it, all but one, whose name is returned: the new block is to be written over
        it. None if nothing has to go.
        """
        if self._must_look(num_bytes):
            self.look()
        to_write_over: str | None = None
        with self._lock:
            self._written_bytes += num_bytes
            self._used_bytes += num_bytes
            while self._is_too_much() and self._oldest:
                file = self._oldest.popleft()
                if folder.used_s(file.name) != file.used_s:
                    continue  # used since the scan, or removed by another process
                self._used_bytes -= file.num_bytes
                if to_write_over is None:
                    to_write_over = file.name
                else:
                    folder.remove(file.name)
        return to_write_over

    def _must_look(self, num_bytes: int) -> bool:
        with self._lock:
            return self._looked_s < 0 or (self._is_too_much(num_bytes) and not self._oldest)

    def _is_too_much(self, num_more_bytes: int = 0) -> bool:
        return self._max_bytes is not None and self._used_bytes + num_more_bytes > self._max_bytes

    def _is_over(self, file: FoundFile) -> bool:
        if file.is_block:
            return self._folder.ages.is_expired(file.used_s)
        return abs(self._folder.ages.age_s(file.used_s)) > _ASIDE_MAX_AGE_S


def _first(blocks: list[FoundFile], num_bytes: float) -> deque[FoundFile]:
    """The first of these blocks, as many as it takes to have `num_bytes`."""
    first = deque[FoundFile]()
    for block in blocks:
        if num_bytes <= 0:
            break
        first.append(block)
        num_bytes -= block.num_bytes
    return first
