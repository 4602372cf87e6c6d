"""One line a record, on stderr, with the process's name in it: several processes often share a terminal."""

import logging
import sys
import time


def configure_logging(level: str, process: str) -> None:
    """Once, from `main`. `process` is a role and what tells it from its like: `prefill:50051`."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class Sparse:
    """Lets the same message through once in `interval_s`, so that an outage is a line and not a flood."""

    def __init__(self, interval_s: float = 10.0) -> None:
        self._interval_s = interval_s
        self._last_s: dict[str, float] = {}

    def allows(self, key: str) -> bool:
        now = time.monotonic()
        if now - self._last_s.get(key, -self._interval_s) < self._interval_s:
            return False
        self._last_s[key] = now
        return True
