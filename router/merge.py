"""Several streams as one, each item as soon as it is there."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T]], max_pending: int = 0) -> AsyncGenerator[T]:
    """The first error of any ends all of them; closing it closes all of them.

    No stream runs ahead of the reader by more than `max_pending` items; 0: by as many as there are.
    """
    items: asyncio.Queue[T | Exception | None] = asyncio.Queue(max_pending)
    tasks = [asyncio.create_task(_copy(stream, items)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(stream: AsyncGenerator[T], items: "asyncio.Queue[T | Exception | None]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await items.put(item)
        await items.put(None)
    except Exception as error:
        await items.put(error)
