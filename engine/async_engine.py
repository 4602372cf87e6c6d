"""The one thread that owns the engine, and the two queues by which asyncio talks to it.

    event loop --- commands ---> SimpleQueue ---> engine thread
    event loop <-- results ----- call_soon_threadsafe ---

The thread sleeps when there is nothing to do, and it never waits for the event loop.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kvasir.common.errors import EngineDead, InvalidRequest
from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.grammar import Compiled
from kvasir.engine.request import Request, RequestId
from kvasir.engine.stats import EngineStats
from kvasir.engine.step import Failed, StepResult

log = logging.getLogger(__name__)
T = TypeVar("T")
Command = Callable[[Engine], object]
Waiter = asyncio.Future[Any]


class AsyncEngine:
    """All methods belong to the event loop on which `start` was called; none of them blocks.

    `on_result` is called there with what each step gave. `on_crash` is called there once, when the engine has thrown
    what nobody foresaw; nothing else comes after it, and this process should end.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_result: Callable[[StepResult], None],
        on_crash: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_result = on_result
        self._on_crash = on_crash
        self._clock = clock
        self._commands: SimpleQueue[tuple[Command, Waiter | None]] = SimpleQueue()
        self._lock = threading.Lock()  # between "is it alive? then put" and "it has ended, empty the queue"
        self._has_ended = False
        self._is_stopping = False
        self._is_idle = True
        self._alive_at_s = clock()
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        engine.on_newcomers = self._deliver

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()

    async def close(self, deadline_s: float = 10.0) -> None:
        """Stop after the step in progress. Raises EngineDead if that does not end in time."""
        with suppress(EngineDead):
            self._post(lambda _: self._stop())
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), deadline_s)
        except TimeoutError:
            raise EngineDead(f"the engine did not stop within {deadline_s} s") from None
        self._thread.join()
        self._engine.close()

    def submit(self, request: Request) -> None:
        """Raises InvalidRequest at once if it can never fit. Refused later, it comes back as `Failed`."""
        self._engine.check_fits(request)
        grammar, grammars = request.sampling.grammar, self._engine.grammars
        if grammar is not None and grammars is None:
            raise InvalidRequest("this node knows no grammars")
        self._post(lambda engine: self._submit(engine, request))
        if grammar is not None and grammars is not None:
            grammars.start(grammar, lambda outcome: self._on_compiled(request, outcome))

    def cancel(self, request_id: RequestId) -> None:
        self._post(lambda engine: engine.cancel(request_id))

    def block_loaded(self, request_id: RequestId, index: int, is_exact: bool = True) -> None:
        self._post(lambda engine: engine.block_loaded(request_id, index, is_exact))

    def loading_done(self, request_id: RequestId) -> None:
        self._post(lambda engine: engine.loading_done(request_id))

    def continue_with(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._post(lambda engine: engine.continue_with(request_id, token_ids))

    def release_blocks(self, block_ids: Sequence[BlockId]) -> None:
        self._post(lambda engine: engine.release_blocks(block_ids))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` between two steps, on the engine's thread, and return what it returns."""
        waiter: asyncio.Future[T] = self._loop.create_future()
        self._post(function, waiter)
        return await waiter

    def stats(self) -> EngineStats:
        """As of the last result: what it told, and these numbers, never contradict each other. Any thread may ask."""
        return self._stats

    @property
    def step(self) -> int:
        return self._stats.step

    @property
    def age_s(self) -> float:
        """Seconds since the last step ended; 0 while there is nothing to do."""
        return 0.0 if self._is_idle else self._clock() - self._alive_at_s

    def _hear(self, stats: EngineStats, result: StepResult) -> None:
        self._stats = stats
        if not result.is_empty:
            self._on_result(result)

    def _on_compiled(self, request: Request, outcome: Compiled | Exception) -> None:
        """Called in any thread."""
        with suppress(EngineDead):
            if isinstance(outcome, Exception):
                self._post(lambda engine: self._fail(engine, request, outcome))
            else:
                self._post(lambda engine: engine.grammar_ready(request.request_id, outcome))

    def _post(self, command: Command, waiter: Waiter | None = None) -> None:
        with self._lock:
            if self._has_ended:
                raise EngineDead("the engine has stopped")
            self._commands.put((command, waiter))

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                has_work = self._engine.has_work and not self._is_stopping
                self._deliver(self._engine.step() if has_work else StepResult(self._engine.stats().step))
                self._alive_at_s = self._clock()
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.exception("the engine has crashed")
            self._on_loop(self._on_crash, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        finally:
            self._end()

    def _take_commands(self) -> None:
        """Run all that are there; sleep until there is one if nothing else is to be done."""
        if not self._engine.has_work:
            self._is_idle = True
            first = self._commands.get()
            self._alive_at_s = self._clock()
            self._is_idle = False
            self._run_command(*first)
        with suppress(Empty):
            while not self._is_stopping:
                self._run_command(*self._commands.get_nowait())

    def _run_command(self, command: Command, waiter: Waiter | None) -> None:
        if waiter is None:
            command(self._engine)
            return
        try:
            self._on_loop(_resolve, waiter, command(self._engine))
        except Exception as error:
            self._on_loop(_reject, waiter, error)

    def _fail(self, engine: Engine, request: Request, error: Exception) -> None:
        """And its forks, before it: they are what would keep it."""
        failed = tuple(Failed(one.request_id, error) for one in (*request.forks, request))
        for one in failed:
            engine.cancel(one.request_id)
        self._deliver(StepResult(engine.stats().step, failed=failed))

    def _submit(self, engine: Engine, request: Request) -> None:
        try:
            engine.submit(request)
        except InvalidRequest as error:
            self._deliver(StepResult(engine.stats().step, failed=(Failed(request.request_id, error),)))

    def _deliver(self, result: StepResult) -> None:
        self._on_loop(self._hear, self._engine.stats(), result)

    def _stop(self) -> None:
        self._is_stopping = True

    def _end(self) -> None:
        """Nobody is left waiting: commands that came too late fail."""
        with self._lock:
            self._has_ended = True
        with suppress(Empty):
            while True:
                _, waiter = self._commands.get_nowait()
                if waiter is not None:
                    self._on_loop(_reject, waiter, EngineDead("the engine has stopped"))
        self._on_loop(_resolve, self._ended, None)

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *args)


def _resolve(waiter: Waiter, value: object) -> None:
    if not waiter.done():
        waiter.set_result(value)


def _reject(waiter: Waiter, error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)
