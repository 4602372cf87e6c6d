"""Server-sent events: how they look, and a response that stops its source when the client leaves."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvasir.router.openai.client_gone import ClientGone, unless_gone

DONE = b"data: [DONE]\n\n"

# No proxy may hold events back: nginx reads the second, compressing ones the first.
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def event(content: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(content) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends each event as it comes. However it ends, `close` is called: the source may hold what costs others."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
