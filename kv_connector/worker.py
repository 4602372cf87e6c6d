"""A thread for calls that block, and that may hang: it keeps neither the event loop nor the process from going on."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """One thread, one call after the other; not one of asyncio's, since a process waits for those at its end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """To be awaited or not: the call is made in any case."""
        future: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if only by us
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return future

    def stop(self) -> None:
        """After the calls made so far."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                self._tell(future, future.set_result, function())
            except BaseException as error:
                self._tell(future, future.set_exception, error)
            del call, future, function  # and what they hold, while there is nothing to do

    def _tell(self, future: asyncio.Future[Any], tell: Callable[[Any], None], outcome: Any) -> None:
        def tell_it() -> None:
            if not future.done():
                tell(outcome)

        with suppress(RuntimeError):  # the loop has been closed, and nobody waits any more
            self._loop.call_soon_threadsafe(tell_it)
