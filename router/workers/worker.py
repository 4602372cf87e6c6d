"""`python -m kvasir.router.workers.worker`: one of several processes that are a router. Started by the parent alone."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import orjson
import uvloop
from jinja2 import TemplateError

from kvasir.common.logging import configure_logging
from kvasir.proto import registry_pb2_grpc, workers_pb2_grpc
from kvasir.proto import workers_pb2 as pb
from kvasir.router.assembly import Router, running_router
from kvasir.router.config import RouterConfig
from kvasir.router.garbage import settle
from kvasir.router.http_server import running_http_worker
from kvasir.router.openai.errors import HttpError
from kvasir.router.registry import RegistryServicer
from kvasir.router.server import StopSignals
from kvasir.router.text.token_bytes import UnsupportedTokenizer
from kvasir.router.workers.door import Inbox
from kvasir.router.workers.places import Places, channel_to, hub_stub, server_at
from kvasir.router.workers.sharing import AmongWorkers

log = logging.getLogger("kvasir.router.workers.worker")  # this module is run as a program


class Worker(workers_pb2_grpc.WorkerServiceServicer):
    """What it answers to the parent, and to the other workers."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Tell(self, request: pb.TellRequest, context: Any) -> pb.TellResponse:
        return pb.TellResponse(content=await self._answer(request.topic, request.argument))

    async def _answer(self, topic: pb.Topic.ValueType, argument: str) -> bytes:
        own = self._router.overview
        if topic == pb.TOPIC_READY:
            num_prefill, num_decode = map(int, argument.split())
            return (await own.why_not_ready(num_prefill, num_decode)).encode()
        if topic == pb.TOPIC_LOAD:
            return str(await own.load()).encode()
        if topic == pb.TOPIC_METRICS:
            return await own.metrics()
        [picture] = await own.pictures(argument)
        return orjson.dumps(picture)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> None:
        try:
            events = self._router.streams.events(request.owner, request.last_event_id)
        except HttpError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        async with aclosing(events):
            await context.write(pb.ResumeResponse())
            async for event in events:
                await context.write(pb.ResumeResponse(event=event))


async def serve_worker(number: int, places: Places, control: socket.socket, config: RouterConfig) -> None:
    """Until a signal comes, or the parent is gone."""
    stop = StopSignals()
    async with channel_to(places.hub()) as channel:
        sharing = AmongWorkers(number, places, hub_stub(channel))
        async with (
            running_router(config, sharing) as router,
            _answering(router, places.worker(number), stop, config.shutdown_grace_s),
            running_http_worker(router.app, config.shutdown_grace_s, config.http_bounds) as server,
        ):

            def end() -> None:
                log.warning("the parent is gone")
                shutil.rmtree(places.folder, ignore_errors=True)  # nobody else would; who is connected stays so
                stop.first.set()
                server.hurry()

            stop.on_second = server.hurry
            settle()
            inbox = Inbox(control, server.adopt, on_parent_gone=end)
            await stop.first.wait()
            await inbox.close()


@asynccontextmanager
async def _answering(router: Router, place: str, stop: StopSignals, grace_s: float) -> AsyncIterator[None]:
    server = server_at(place)
    workers_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(router), server)  # type: ignore[no-untyped-call]
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(  # type: ignore[no-untyped-call]
        RegistryServicer(router.cluster.registry), server
    )
    await server.start()
    try:
        yield
    finally:
        # Others may be reading streams that are kept here, for what is left of the grace time.
        await server.stop(grace=max(0.0, stop.first_s + grace_s - time.monotonic()))


def main() -> None:
    number, folder, descriptor = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = RouterConfig(**orjson.loads(sys.stdin.buffer.read()))
    configure_logging(config.log_level, f"router:{config.port}.{number}")
    started_s = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_worker(number, Places(folder), socket.socket(fileno=descriptor), config))
    except (OSError, ValueError, UnsupportedTokenizer, TemplateError) as error:
        sys.exit(f"error: {error}")
    log.info("worker %d stopped after %.0f s", number, time.monotonic() - started_s)


if __name__ == "__main__":
    main()
