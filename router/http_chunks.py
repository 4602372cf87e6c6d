"""Writing to a streamed response's connection without waiting for a turn: what uvicorn's `send` does with a chunk, less
all that it must ask itself about other messages."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITE_CHUNK = "kvasir.write_chunk"  # in a scope: its ChunkWriter


class ChunkWriter:
    __slots__ = ("_cycle", "_flow", "_transport", "num_written")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.num_written = 0

    def can_write(self) -> bool:
        """The response is under way, in chunks, and its client keeps up."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        return bool(cycle.response_started and cycle.chunked_encoding)

    def __call__(self, data: bytes) -> None:
        """Only while it can. More than a client takes in is kept for it."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.num_written += 1
