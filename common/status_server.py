"""`/metrics` and `/health` over HTTP, in a few lines of asyncio: nodes need no web framework.

GET and HEAD only, one request a connection, header and time bounded: a stranger on this port costs next to nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.common.addresses import split_address
from kvasir.common.metrics import Metrics

log = logging.getLogger(__name__)
_MAX_HEADER_BYTES = 8192
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 64
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Health:
    is_healthy: bool
    message: str


class StatusServer:
    """`health` is asked at every call and must not block."""

    def __init__(self, metrics: Metrics, health: Callable[[], Health]) -> None:
        self._metrics = metrics
        self._health = health
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listen: str) -> int:
        """The port that was bound. OSError if somebody else has it."""
        host, port = split_address(listen)
        self._server = await asyncio.start_server(self._accept, host, port, limit=_MAX_HEADER_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a connection to the status port ended before its request did")
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return _response(400, b"not HTTP\n")
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _response(405, b"GET or HEAD\n", more_headers="Allow: GET, HEAD\r\n")
        status, body, content_type = self._content(target.partition("?")[0])
        return _response(status, body, content_type, with_body=method == "GET")

    def _content(self, path: str) -> tuple[int, bytes, str]:
        if path == "/metrics":
            body, content_type = self._metrics.render()
            return 200, body, content_type
        if path == "/health":
            health = self._health()
            return (200 if health.is_healthy else 503), f"{health.message}\n".encode(), "text/plain; charset=utf-8"
        return 404, b"there are /metrics and /health\n", "text/plain; charset=utf-8"


def _response(
    status: int,
    body: bytes,
    content_type: str = "text/plain; charset=utf-8",
    *,
    with_body: bool = True,
    more_headers: str = "",
) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{more_headers}\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")
