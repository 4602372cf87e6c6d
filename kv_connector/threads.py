"""Blocking calls on threads, which the event loop can call off.

Neither `asyncio.to_thread` nor `concurrent.futures` will do: a process waits for their threads when it exits, so a
hanging file system would keep it from ending.
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
    """The result of this call is not wanted any more."""


class Job(Generic[T]):
    """One call. Some methods are for the event loop, others for the thread that runs the call."""

    def __init__(self) -> None:
        self.has_waited = False  # when done: whether it spent most of its time waiting, not computing
        self.done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs it
        self._lock = threading.Lock()
        self._is_off = False
        self._cut: Callable[[], None] | None = None

    def call_off(self) -> None:
        """For the event loop. The call ends soon, unless it hangs where nothing can interrupt it."""
        with self._lock:
            self._is_off = True
            if self._cut is not None:
                self._cut()

    async def outcome(self) -> T:
        """The result of the call, or its error. If the caller is cancelled, it calls the job off and leaves."""
        try:
            return await asyncio.shield(self.done)
        except asyncio.CancelledError:
            self.call_off()
            raise

    async def settled(self) -> None:
        """Call it off, and wait until the thread touches nothing any more. A cancelled caller stops waiting."""
        self.call_off()
        await asyncio.wait({self.done})

    def check(self) -> None:
        """For the thread: raises CalledOff if the result is not wanted any more."""
        if self._is_off:
            raise CalledOff

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """For the thread: as `check`; and `call_off` waits for the end of this block."""
        with self._lock:
            self.check()
            yield

    def can_be_cut(self, cut: Callable[[], None] | None) -> None:
        """For the thread: from here on, `call_off` uses `cut` to make a blocking call return. None: no longer."""
        with self._lock:
            self._cut = cut
        self.check()


class Threads:
    """At most `most` threads, each started when first needed. They end when stopped, or with the process."""

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_unfinished = 0  # calls; touched on the event loop only

    def start(self, function: Callable[Concatenate[Job[T], P], T], *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Call `function(job, *args, **kwargs)` on the first free thread."""
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
        """End the threads, after the calls that have been made so far."""
        for _ in range(self._num_threads):
            self._calls.put(None)
        self._num_threads = 0

    def _finished(self, _: object) -> None:
        self._num_unfinished -= 1

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or it would be kept alive while waiting for the next one
