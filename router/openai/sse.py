"""Server-sent events: how they look, and a response that stops its source when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvasir.router.guard import SEND_BODY
from kvasir.router.http_chunks import WRITE_CHUNK, ChunkWriter
from kvasir.router.openai.client_gone import ClientGone, unless_gone
from kvasir.router.openai.short_way import ShortWay

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": still here\n\n"  # a comment: no client sees it, and no proxy takes the connection for idle
HEARTBEAT_S = 15.0

# No proxy may hold events back: nginx reads the second, compressing ones the first.
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def event(content: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(content) + b"\n\n"


async def _nothing() -> None:
    pass


class EventStream(StreamingResponse):
    """Sends each event as it comes, and comments while none does. However it ends, `close` is called: the source may
    hold what costs others."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]] = _nothing,
        heartbeat_s: float = HEARTBEAT_S,
        short_way: ShortWay | None = None,
    ) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self._events = events
        self._close = close
        self._heartbeat_s = heartbeat_s
        self._short_way = short_way
        self._num_sent = 0  # the long way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send, scope.get(SEND_BODY, send), scope.get(WRITE_CHUNK)))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send, send_body: Send, write_chunk: ChunkWriter | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        beating = asyncio.create_task(self._beat(send, write_chunk))
        if self._short_way is not None and write_chunk is not None and write_chunk.is_of_use:
            self._short_way.open(write_chunk)
        try:
            async for data in self._events:
                await send_body({"type": "http.response.body", "body": data, "more_body": True})
                self._num_sent += 1
            beating.cancel()  # the end is sent with the last events: nothing stands between them
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._short_way is not None:
                self._short_way.close()
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self, send: Send, write_chunk: ChunkWriter | None) -> None:
        """Looks twice in the time that a connection may be silent."""
        num_seen = 0
        while True:
            await asyncio.sleep(self._heartbeat_s / 2)
            num_sent = self._num_sent + (0 if write_chunk is None else write_chunk.num_written)
            if num_sent == num_seen:
                await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
            num_seen = num_sent
