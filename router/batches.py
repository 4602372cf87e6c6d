"""Calls that go one after the other: what comes while one is on its way goes with the next."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
A = TypeVar("A")


class Batches(Generic[T, A]):
    """Belongs to one event loop. `send` has an answer for each of what it is given; what it raises, all of them get."""

    def __init__(self, send: Callable[[Sequence[T]], Awaitable[Sequence[A]]]) -> None:
        self._send = send
        self._next: list[tuple[T, asyncio.Future[A]]] = []
        self._sending: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, one: T) -> asyncio.Future[A]:
        """Its answer; cancelled if there will be none."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            answer.cancel()
            return answer
        self._next.append((one, answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())
        return answer

    async def close(self) -> None:
        self._is_closed = True
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        self._give_up([])

    async def _send_all(self) -> None:
        while self._next:
            batch, self._next = self._next, []
            waiting = [answer for _, answer in batch]
            try:
                answers = await self._send([one for one, _ in batch])
                for left, answer in zip(waiting, answers, strict=True):
                    if not left.done():  # whoever asked may have gone
                        left.set_result(answer)
            except Exception as error:
                for left in waiting:
                    if not left.done():
                        left.set_exception(error)
            except BaseException:  # we are cancelled, or the call was, with what carries it
                self._give_up(waiting)
                raise

    def _give_up(self, waiting: Sequence[asyncio.Future[A]]) -> None:
        """These, and whoever waits for the next call."""
        coming, self._next = self._next, []
        for left in (*waiting, *(answer for _, answer in coming)):
            left.cancel()
