"""Writing to HTTP connections: what is made at one time goes out together, and a chunk of a streamed response goes out
without waiting for a turn.

A write goes through the kernel and wakes whoever reads. So nothing is written at once, but when those who make it have
come to an end, or a few connections wait: the chunks of a node's step; the head of an answer, its opening and its first
token.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITE_CHUNK = "kvasir.write_chunk"  # in a scope: its ChunkWriter

_MAX_WAITING = 8  # connections; with more, the first of a large step would wait for the last
_MAX_GATHERED_BYTES = 16 << 10  # of one connection; more is the transport's business, which stops whoever writes


class Outbox:
    """Connections with something to write."""

    __slots__ = ("_connections",)

    def __init__(self) -> None:
        self._connections: list[GatheringTransport] = []

    def put(self, connection: "GatheringTransport") -> None:
        if not self._connections:
            asyncio.get_running_loop().call_soon(self._flush)
        elif len(self._connections) >= _MAX_WAITING:
            self._flush()
        self._connections.append(connection)

    def _flush(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.flush()


class GatheringTransport(asyncio.Transport):
    """A connection's transport that gathers what it is given until the outbox's turn."""

    __slots__ = ("_gathered", "_outbox", "_transport")

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        self._transport = transport
        self._outbox = outbox
        self._gathered = b""

    def write(self, data: Any) -> None:
        if self._gathered:
            self._gathered = b"%b%b" % (self._gathered, data)
        elif data:
            self._gathered = data
            self._outbox.put(self)
        if len(self._gathered) > _MAX_GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, b""
            if not self._transport.is_closing():
                self._transport.write(gathered)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class ChunkWriter:
    """What uvicorn's `send` does with a chunk, less all that it must ask itself about other messages."""

    __slots__ = ("_cycle", "_flow", "_transport", "num_written")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.num_written = 0

    @property
    def is_of_use(self) -> bool:
        """The response is under way, and in chunks."""
        cycle = self._cycle
        return bool(cycle.response_started and cycle.chunked_encoding and not cycle.disconnected)

    def can_write(self) -> bool:
        """Its client keeps up."""
        return not self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Only while it can, and before the response's end. More than a client takes in is kept for it."""
        self.num_written += 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
