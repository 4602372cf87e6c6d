"""Keeps the processes of a cluster running, and stops them in order."""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvasir.cli.child import Child, ChildSpec, describe_exit


class ClusterFailed(Exception):
    """A process ended that must not; the message holds its last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDelays:
    """Doubles with every restart in a row; a process that ran long enough begins at the start again."""

    first_s: float = 0.5
    longest_s: float = 30.0
    long_enough_s: float = 60.0

    def after(self, num_restarts: int) -> float:
        return float(min(self.longest_s, self.first_s * 2 ** min(num_restarts, 16)))


class Supervisor:
    """While the cluster starts, any death is a failure. Once `heal` is called, what can be restarted is."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        show: Callable[[str, str], None],
        say: Callable[[str], None],
        delays: RestartDelays | None = None,
    ) -> None:
        self.children = [Child(spec, show) for spec in specs]
        self._say = say
        self._delays = delays or RestartDelays()
        self._healing = False
        self._stopping = False
        self._watchers: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        for child in self.children:
            await child.start()
            self._watchers.append(asyncio.create_task(self._watch(child)))

    def heal(self) -> None:
        self._healing = True

    async def stop(self, grace_s: float) -> None:
        """Tier by tier: what is behind is still there while those in front of it finish their work."""
        self._stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for children in _tiers(self.children):
            running = [child for child in children if child.is_running]
            if not running:
                continue
            self._say(f"stopping {', '.join(child.spec.name for child in running)}")
            in_time = await asyncio.gather(*(child.stop(grace_s) for child in running))
            for child, was_clean in zip(running, in_time, strict=True):
                if not was_clean:
                    self._say(f"{child.spec.name} did not stop within {grace_s:g} s and was killed")
        self.failure.cancel()

    def kill(self) -> None:
        self._stopping = True
        for child in self.children:
            child.send(signal.SIGKILL)

    async def _watch(self, child: Child) -> None:
        num_restarts = 0
        while True:
            status = await child.wait()
            if self._stopping:
                return
            name, how = child.spec.name, describe_exit(status)
            if not (self._healing and child.spec.can_restart):
                self._fail(f"{name} ended ({how}). Its last lines:\n" + "\n".join(f"  {line}" for line in child.lines))
                return
            if time.monotonic() - child.started_s > self._delays.long_enough_s:
                num_restarts = 0
            news: str | None = f"ended ({how}); starting it again"
            while news:
                delay_s = self._delays.after(num_restarts)
                num_restarts += 1
                self._say(f"{name} {news} in {delay_s:g} s")
                await asyncio.sleep(delay_s)
                why_not = await _start(child)
                news = why_not and f"cannot be started ({why_not}); trying again"

    def _fail(self, message: str) -> None:
        if not self.failure.done():
            self.failure.set_exception(ClusterFailed(message))


async def _start(child: Child) -> str | None:
    """Why it cannot be: what killed it, a lack of memory, may keep it from being started too."""
    try:
        await child.start()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _tiers(children: Sequence[Child]) -> Iterable[list[Child]]:
    ordered = sorted(children, key=lambda child: child.spec.stop_order)
    for _, tier in itertools.groupby(ordered, key=lambda child: child.spec.stop_order):
        yield list(tier)
