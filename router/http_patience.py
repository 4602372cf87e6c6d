"""Connections that take their time: how many there may be, and how long a request may take to arrive. A client that
sends a byte a second, or nothing, holds a connection only for so long."""

import asyncio
from typing import Any

from kvasir.router.http_bounds import HttpBounds
from kvasir.router.http_protocol import BoundedHttpProtocol
from kvasir.router.openai.errors import HttpError


class PatientHttpProtocol(BoundedHttpProtocol):
    def __init__(self, *args: Any, bounds: HttpBounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.limit_concurrency:
            message = f"there are {self._bounds.limit_concurrency} connections already"
            again = {"retry-after": "1"}
            self.refuse(HttpError(503, message, "too_many_connections", again, kind="service_unavailable"))
        else:
            self._wait_for("head", self._bounds.timeout_head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._patience is None:  # else since the connection was made
            self._wait_for("head", self._bounds.timeout_head_s)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._wait_for("body", self._bounds.timeout_body_s)

    def on_message_complete(self) -> None:
        self._stop_waiting()
        super().on_message_complete()

    def _wait_for(self, part: str, timeout_s: float) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(timeout_s, self._lose_patience, part, timeout_s)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self, part: str, timeout_s: float) -> None:
        self._patience = None
        if self.transport.is_closing():
            return
        cycle = self.cycle  # of this request's body, or of the request before it
        if cycle is not None and (cycle.response_started if part == "body" else not cycle.response_complete):
            self.transport.abort()
        else:
            message = f"the {part} of the request did not arrive within {timeout_s:g} s"
            self.refuse(HttpError(408, message, "request_timeout"))
