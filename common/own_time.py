"""A clock that counts only the time in which this process could work.

It stands still while the process is stopped, while its event loop is blocked, and while it waits for something that it
needs to take blocks in, such as a codec. Peers, stores and helping processes are not to blame for that time, so their
speed is measured and their deadlines are kept by this clock.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

_LOOK_S = 0.1
_MOST_S = 0.5  # the most that counts between two looks; a loop that is merely busy looks sooner than that


class OwnTime:
    """The time of `clock` in seconds, minus all stalls so far. Belongs to one event loop.

    Stalls are noticed only while somebody waits with a `Limit`, which looks at the clock every tenth of a second.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stalled_s = 0.0
        self._looked_s = 0.0
        self._num_looking = 0
        self._num_standing = 0
        self._stands_at_s = 0.0

    def __call__(self) -> float:
        if self._num_standing:
            return self._stands_at_s
        now_s = self._clock()
        if self._num_looking:
            now_s = min(now_s, self._looked_s + _MOST_S)
        return now_s - self._stalled_s

    def look(self) -> None:
        now_s = self._clock()
        if self._num_looking:
            self._stalled_s += max(0.0, now_s - self._looked_s - _MOST_S)
        self._looked_s = now_s

    def begin(self) -> None:
        self.look()
        self._num_looking += 1

    def end(self) -> None:
        self.look()
        self._num_looking -= 1

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        self._stands_at_s = self()
        self._num_standing += 1
        try:
            yield
        finally:
            self._num_standing -= 1
            if not self._num_standing:
                self._stalled_s += self() - self._stands_at_s


class Limit:
    """As `asyncio.timeout`, but by own time. It expires at `at_s`, which may be changed at any time at no cost.

    After a change to an earlier time it may expire up to a tenth of a second late.
    """

    def __init__(self, clock: OwnTime, at_s: float = float("inf")) -> None:
        self.at_s = at_s
        self._clock = clock
        self._timeout = asyncio.timeout(None)
        self._next_look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._clock.begin()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        self._clock.end()
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        return self._timeout.expired()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._clock.look()
        left_s = self.at_s - self._clock()
        if left_s <= 0:
            self._timeout.reschedule(loop.time())
        else:
            self._next_look = loop.call_later(min(left_s, _LOOK_S), self._look)


def own_timeout(seconds: float) -> Limit:
    """As `asyncio.timeout`, by a clock of its own."""
    clock = OwnTime(time.monotonic)
    return Limit(clock, clock() + seconds)
