"""The tokens of one generation on their way to its reader."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from kvasir.router.types import Reader, TokenDelta


class Delivery:
    """What comes while the reader waits it may take at once; else it is kept, however slowly the reader reads."""

    __slots__ = ("_error", "_has_ended", "_kept", "_reader", "_waiter")

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: deque[TokenDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None  # there while the reader waits
        self._has_ended = False
        self._error: Exception | None = None

    def put(self, delta: TokenDelta) -> None:
        reader = self._reader
        if self._waiter is not None and reader.take is not None and reader.take(delta):
            reader.num_tokens_taken += len(delta.token_ids)
            return
        self._kept.append(delta)
        self._wake()

    def end(self, error: Exception | None) -> None:
        """Behind what has been put."""
        self._has_ended, self._error = True, error
        self._wake()

    async def deltas(self) -> AsyncGenerator[TokenDelta]:
        while True:
            while self._kept:
                yield self._kept.popleft()
            if self._has_ended:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
