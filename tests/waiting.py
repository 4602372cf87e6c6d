"""Waiting until something is true. Every wait has a deadline, and missing it fails the test."""

import asyncio
import time
from collections.abc import Callable

TIMEOUT_S = 60.0


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S, what: str = "") -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what or condition}"
        time.sleep(0.05)


async def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """As `wait_until`, while the event loop goes on."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {condition}"
        await asyncio.sleep(0.01)
