"""How old a stored block is, by the clock of the file server, which need not agree with this machine's."""

import os
import time
from contextlib import suppress

_MAX_TOUCH_INTERVAL_S = 300.0


class Ages:
    """A block's time of use is its file's mtime: reading a block touches the file, though not every time."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._touch_interval_s = min(ttl_s / 8, _MAX_TOUCH_INTERVAL_S)
        self._server_ahead_s = 0.0  # the server's clock minus ours

    def compare_clocks(self, folder: int) -> None:
        """Learn the server's time by touching the folder, so that a wrong clock here makes no block look expired."""
        with suppress(OSError):  # a read-only mount
            os.utime(folder)
            self._server_ahead_s = os.fstat(folder).st_mtime - time.time()

    def age_s(self, used_s: float) -> float:
        """Seconds since an mtime. Negative if the server's clock was set back since, or the mtime is nonsense."""
        return time.time() + self._server_ahead_s - used_s

    def is_expired(self, used_s: float) -> bool:
        return abs(self.age_s(used_s)) > self.ttl_s

    def needs_touch(self, used_s: float) -> bool:
        """Whether a use now is worth a write of the mtime."""
        return abs(self.age_s(used_s)) > self._touch_interval_s
