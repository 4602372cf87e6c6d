"""How much of a shared folder is used, and what has to go: the blocks longest unused.

Every process looks for itself, and nobody waits for anybody. What others write is not known before the next look, which
comes when a sixteenth of the quota has been written, but neither within a second nor so soon that looking would take
more than a tenth of the time: by so much, for each process that writes, the quota may be exceeded for a while.
"""

import threading
import time
from collections import deque

from kvasir.kv_connector.shared_storage.files import BlockFolder, FoundFile, OpenFolder

_ASIDE_MAX_AGE_S = 600.0  # what a writer that died has left
_LOOK_AGAIN_SHARE = 1 / 16  # of the quota, written since
_MIN_LOOK_INTERVAL_S = 1.0
_MIN_LOOK_INTERVALS = 10  # of what the look before took
_OLDEST_SHARE = 1 / 2  # of the quota: so much of the oldest is remembered from a look


class Quota:
    """Called by the threads that write."""

    def __init__(self, folder: BlockFolder, max_bytes: int | None) -> None:
        """max_bytes None: half of what the disk has free or we have, at the first look."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._used_bytes = 0
        self._written_bytes = 0  # since the last look
        self._oldest: deque[FoundFile] = deque()
        self._looked_s = float("-inf")
        self._look_again_s = float("-inf")

    @property
    def wants_a_look(self) -> bool:
        """What others write may have come to matter. Asked on the event loop, so it waits for no lock: whoever has it
        may be held up by the file system."""
        if self._max_bytes is None or time.monotonic() < self._look_again_s:
            return False
        return self._written_bytes > self._max_bytes * _LOOK_AGAIN_SHARE

    def look(self) -> None:
        """What there is now. What is over its time, and what writers that died have left, is removed."""
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
                self._used_bytes = used_bytes + self._written_bytes  # some of it counts twice, until the next look
                self._oldest = _first(blocks, self._max_bytes * _OLDEST_SHARE)
                self._looked_s = time.monotonic()
                took_s = self._looked_s - started_s
                self._look_again_s = self._looked_s + max(_MIN_LOOK_INTERVAL_S, _MIN_LOOK_INTERVALS * took_s)

    def make_room(self, folder: OpenFolder, num_bytes: int) -> str | None:
        """For a block about to be written. What must go for it is gone but for one, named here: to be written over."""
        if self._must_look(num_bytes):
            self.look()
        to_write_over: str | None = None
        with self._lock:
            self._written_bytes += num_bytes
            self._used_bytes += num_bytes
            while self._is_too_much() and self._oldest:
                file = self._oldest.popleft()
                if folder.used_s(file.name) != file.used_s:
                    continue  # it was of use since we looked, or had to go for another's block, which is there now
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
            return self._folder.is_old(file.used_s)
        return abs(self._folder.age_s(file.used_s)) > _ASIDE_MAX_AGE_S


def _first(blocks: list[FoundFile], num_bytes: float) -> deque[FoundFile]:
    """So many of them that they have `num_bytes`."""
    first = deque[FoundFile]()
    for block in blocks:
        if num_bytes <= 0:
            break
        first.append(block)
        num_bytes -= block.num_bytes
    return first
