"""Calls that block, on threads of their own, and that can be called off.

Not asyncio's threads, and not those of `concurrent.futures`: a process waits for both at its end, and a file system
that hangs would keep it.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class CalledOff(Exception):
    """Nobody wants what this call would give."""


class Job(Generic[T]):
    """One call, seen from the event loop and from its thread."""

    def __init__(self) -> None:
        self.has_waited = False  # most of its time, for what it called; known when it is done
        self.done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs it
        self._lock = threading.Lock()
        self._is_off = False
        self._cut: Callable[[], None] | None = None

    def call_off(self) -> None:
        """The event loop's side. The thread ends soon, if it is not held up where nothing can cut it short."""
        with self._lock:
            self._is_off = True
            if self._cut is not None:
                self._cut()

    async def outcome(self) -> T:
        """What it gives. A caller that is cancelled calls it off, and does not wait for it."""
        try:
            return await asyncio.shield(self.done)
        except asyncio.CancelledError:
            self.call_off()
            raise

    async def settled(self) -> None:
        """Called off, and over: the thread touches nothing any more. A caller that is cancelled now does not wait."""
        self.call_off()
        await asyncio.wait({self.done})

    def check(self) -> None:
        """The thread's side: go on only if somebody still wants it."""
        if self._is_off:
            raise CalledOff

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """The thread's side: what is done herein is not done once it has been called off."""
        with self._lock:
            self.check()
            yield

    def can_be_cut(self, cut: Callable[[], None] | None) -> None:
        """From here on `cut` makes a call that blocks return. It is called under a lock, at most once a call-off."""
        with self._lock:
            self._cut = cut
        self.check()


class Threads:
    """At most `most` of them, started when they are first needed. They end when stopped, or with the process."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_unfinished = 0  # calls; touched on the event loop only

    def start(self, function: Callable[Concatenate[Job[T], P], T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """function(job, *args) on the first thread that is free."""
        loop, job = asyncio.get_running_loop(), Job[T]()

        def run() -> None:
            outcome: Callable[[], None]
            started_s, computed_s = time.perf_counter(), time.thread_time()
            try:
                job.check()
                result = function(job, *args, **kwargs)
                outcome = partial(job.done.set_result, result)
            except BaseException as error:
                outcome = partial(job.done.set_exception, error)
            job.has_waited = time.thread_time() - computed_s < (time.perf_counter() - started_s) / 2
            with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
                loop.call_soon_threadsafe(outcome)

        self._num_unfinished += 1
        job.done.add_done_callback(self._finished)
        if self._num_threads < min(self._most, self._num_unfinished):
            self._num_threads += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._calls.put(run)
        return job

    def stop(self) -> None:
        """After the calls made so far."""
        for _ in range(self._num_threads):
            self._calls.put(None)
        self._num_threads = 0

    def _finished(self, _: object) -> None:
        self._num_unfinished -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and what it holds, while there is nothing to do
