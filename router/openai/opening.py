"""The moment before a stream begins: status and headers wait for the first token, since what fails before it has a
status of its own."""

import asyncio
from collections.abc import AsyncGenerator

from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.short_way import ShortWay


class Opening:
    """Asks for the first delta at once. To be closed, however it ends."""

    def __init__(self, deltas: AsyncGenerator[ChoiceDelta, None], short_way: ShortWay | None = None) -> None:
        self._deltas = deltas
        self._short_way = short_way
        self._first = asyncio.ensure_future(anext(deltas))

    async def wait(self, at_most_s: float) -> None:
        """Until the first delta is there, but no longer than a proxy may wait; raises what failed before it."""
        try:
            await asyncio.wait({self._first}, timeout=at_most_s)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """All of them. What fails before the first one now fails in the stream."""
        yield await self._first
        if self._short_way is not None:
            self._short_way.begin()
        async for delta in self._deltas:
            yield delta

    async def aclose(self) -> None:
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._deltas.aclose()
