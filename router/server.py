"""A router as a process: how it starts and stops."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from kvasir.router.assembly import Alone, running_router
from kvasir.router.config import RouterConfig
from kvasir.router.garbage import settle
from kvasir.router.http_server import running_http_server

log = logging.getLogger(__name__)


async def serve(config: RouterConfig) -> None:
    """Until a signal comes. Requests that run then may end within the grace time; a second signal ends that too."""
    stop = StopSignals()
    async with (
        running_router(config, Alone()) as router,
        running_http_server(
            router.app, config.host, config.port, config.shutdown_grace_s, config.http_bounds
        ) as server,
    ):
        stop.on_second = server.hurry
        settle()
        log.info("serving %s on http://%s:%d", ", ".join(router.names), config.host, server.port)
        await stop.first.wait()
        log.info("stopping: requests that run may end within %g s", config.shutdown_grace_s)
    log.info("stopped")


class StopSignals:
    """SIGTERM and SIGINT, from now on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.first_s = 0.0  # when it came, by the monotonic clock
        self.on_second: Callable[[], None] = lambda: None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        if self.first.is_set():
            self.on_second()
        else:
            self.first_s = time.monotonic()
        self.first.set()
