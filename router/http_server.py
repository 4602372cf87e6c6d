"""uvicorn, run as one part of a process among others: it starts on a bound socket and is told when to stop."""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvasir.common.addresses import join_address
from kvasir.router.http_bounds import HttpBounds
from kvasir.router.http_chunks import Outbox
from kvasir.router.http_patience import PatientHttpProtocol

_DEFAULT_BOUNDS = HttpBounds()


@asynccontextmanager
async def running_http_server(
    app: ASGIApp, host: str, port: int, grace_s: float, bounds: HttpBounds = _DEFAULT_BOUNDS
) -> AsyncIterator["HttpServer"]:
    """On leaving, nothing new is accepted, and what runs may end within `grace_s`. OSError if the port is taken."""
    async with _running(app, [bound_socket(host, port)], grace_s, bounds) as server:
        yield server


@asynccontextmanager
async def running_http_worker(app: ASGIApp, grace_s: float, bounds: HttpBounds) -> AsyncIterator["HttpServer"]:
    """Serves the connections that it is told to `adopt`."""
    async with _running(app, [], grace_s, bounds) as server:
        yield server


@asynccontextmanager
async def _running(
    app: ASGIApp, listeners: list[socket.socket], grace_s: float, bounds: HttpBounds
) -> AsyncIterator["HttpServer"]:
    protocol: Any = partial(PatientHttpProtocol, bounds=bounds, outbox=Outbox())
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=math.ceil(bounds.timeout_keep_alive_s),
        proxy_headers=False,  # nothing here asks where a client is
        timeout_graceful_shutdown=math.ceil(grace_s),
    )
    server = HttpServer(config, port=listeners[0].getsockname()[1] if listeners else 0)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    listening = asyncio.create_task(server.is_listening.wait())
    try:
        await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
        yield server
    finally:
        listening.cancel()
        server.should_exit = True
        await serving
        # Those that the grace was too short for have been cancelled; what they hold is given back now.
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, port: int) -> None:
        super().__init__(config)
        self.port = port
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    async def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that somebody else has accepted."""

        def protocol() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state={})
            return made

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    def hurry(self) -> None:
        """Cuts off the requests that are waited for."""
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business, and it has more to stop than this."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """Does not listen yet. OSError if the port is taken."""
    # The protocol is named, for only then does asyncio set TCP_NODELAY on what is accepted; without it, an answer
    # in two parts waits 40 ms for the client's delayed acknowledgement of the first.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {join_address(host, port)}: {reason}") from error
    return listener
