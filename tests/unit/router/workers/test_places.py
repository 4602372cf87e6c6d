"""How the processes of one router ask each other, whatever becomes of the other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from kvasir.proto import workers_pb2 as pb
from kvasir.proto import workers_pb2_grpc
from kvasir.router.workers.folder import own_folder
from kvasir.router.workers.places import NoAnswer, Places, answer_of, channel_to, server_at, worker_stub


class Silent(workers_pb2_grpc.WorkerServiceServicer):
    def __init__(self) -> None:
        self.was_asked = asyncio.Event()

    async def Tell(self, request: pb.TellRequest, context: Any) -> pb.TellResponse:
        self.was_asked.set()
        await asyncio.Event().wait()
        return pb.TellResponse()


@asynccontextmanager
async def asking_in_vain(within_s: float) -> AsyncIterator[tuple["asyncio.Task[Any]", grpc.aio.Channel]]:
    """Somebody who waits for an answer that does not come, and the channel."""
    with own_folder() as folder:
        place = Places(folder).worker(0)
        server, silent = server_at(place), Silent()
        workers_pb2_grpc.add_WorkerServiceServicer_to_server(silent, server)  # type: ignore[no-untyped-call]
        await server.start()
        channel = channel_to(place)
        try:
            async with asyncio.timeout(60):
                asking = asyncio.create_task(answer_of(worker_stub(channel).Tell, pb.TellRequest(), within_s))
                await silent.was_asked.wait()
                yield asking, channel
        finally:
            await channel.close(None)
            await server.stop(grace=None)


async def test_a_channel_that_is_closed_meanwhile_is_no_answer() -> None:
    """As the parent does when a worker has died. Whoever waited was cancelled by that: the parent's watch over its
    workers, and its asking of the nodes of a static list, were at an end."""
    async with asking_in_vain(within_s=3600) as (asking, channel):
        await channel.close(None)
        with pytest.raises(NoAnswer, match="closed meanwhile"):
            await asking


async def test_whoever_asks_can_be_cancelled() -> None:
    async with asking_in_vain(within_s=3600) as (asking, _):
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_an_answer_is_not_waited_for_for_ever() -> None:
    async with asking_in_vain(within_s=0.5) as (asking, _):
        with pytest.raises(NoAnswer, match="nothing came within"):
            await asking
