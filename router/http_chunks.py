"""Writing to a streamed response's connection without waiting for a turn: what uvicorn's `send` does with a chunk, less
all that it must ask itself about other messages."""

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITE_CHUNK = "kvasir.write_chunk"  # in a scope: its ChunkWriter


class Outbox:
    """Chunks of all connections, written when those who make them have come to an end: a step of a node makes many.

    A write goes through the kernel and wakes whoever reads; one after the other, they cost half of what they do when
    each waits for the next chunk to be made.
    """

    __slots__ = ("_chunks",)

    def __init__(self) -> None:
        self._chunks: list[tuple[ChunkWriter, bytes]] = []

    def put(self, writer: "ChunkWriter", data: bytes) -> None:
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self.flush)
        self._chunks.append((writer, data))

    def flush(self) -> None:
        chunks, self._chunks = self._chunks, []
        for writer, data in chunks:
            writer.write(data)


class ChunkWriter:
    __slots__ = ("_cycle", "_flow", "_outbox", "_transport", "num_written")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._outbox = outbox
        self.num_written = 0

    def can_write(self) -> bool:
        """The response is under way, in chunks, and its client keeps up."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        return bool(cycle.response_started and cycle.chunked_encoding)

    def __call__(self, data: bytes) -> None:
        """Only while it can; a moment later, behind all that has been made before. More than a client takes in is kept
        for it."""
        self.num_written += 1
        self._outbox.put(self, b"%x\r\n%b\r\n" % (len(data), data))

    def flush(self) -> None:
        """Whatever is sent another way comes behind what has been written here."""
        self._outbox.flush()

    def write(self, chunk: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(chunk)
