"""Ticks: a token's text is the number of the tick that made it, and a file of stamps has the time of each.

So whoever reads a token knows when it was made, whatever it has come through.
"""

import asyncio
import math
import mmap
import time
from collections.abc import Callable
from pathlib import Path

NUM_TICKS = 10_000  # then their numbers begin again
FIRST_TOKEN_ID = 256  # of the token " 0000"


def create_stamps(path: Path) -> None:
    path.write_bytes(bytes(8 * NUM_TICKS))


def read_stamps(path: Path, access: int = mmap.ACCESS_READ) -> "memoryview[float]":
    """On the monotonic clock, which all processes of a machine share; as they are written."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8 * NUM_TICKS, access=access)).cast("d")


class Clock:
    """Numbers ticks and writes their times down. Groups of streams tick in turn, at even distances."""

    def __init__(self, stamps: Path, interval_s: float, num_groups: int) -> None:
        self._stamps = read_stamps(stamps, mmap.ACCESS_WRITE)
        self._interval_s = interval_s
        self._num_groups = num_groups
        self._start_s = time.monotonic()
        self._number = 0

    async def run(self, group: int, tick: Callable[[int], None]) -> None:
        """One that comes late is not made up for."""
        phase_s = self._interval_s * group / self._num_groups
        next_s = self._start_s + phase_s
        next_s += self._interval_s * max(0, math.ceil((time.monotonic() - next_s) / self._interval_s))
        await asyncio.sleep(next_s - time.monotonic())
        while True:
            self._number = (self._number + 1) % NUM_TICKS
            self._stamps[self._number] = time.monotonic()
            tick(self._number)
            next_s = max(next_s + self._interval_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
