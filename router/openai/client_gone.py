"""A client that hangs up ends the work that was done for it."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. The request's body has been read before."""
    task = asyncio.current_task()
    assert task is not None, "an endpoint runs in a task"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.cancelling() == 1:  # else somebody else has cancelled us, too
            raise ClientGone from None
        raise
    finally:
        watching.cancel()
        if is_gone:
            task.uncancel()  # also where `work` has made something else of it
