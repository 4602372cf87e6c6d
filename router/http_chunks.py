"""Writing to a streamed response's connection without waiting for a turn: what uvicorn's `send` does with a chunk, less
all that it must ask itself about other messages."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

WRITE_CHUNK = "kvasir.write_chunk"  # in a scope: its ChunkWriter


class ChunkWriter:
    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def can_write(self) -> bool:
        """The response is under way, in chunks, and its client keeps up."""
        cycle = self._cycle
        is_streaming = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        return bool(is_streaming) and not (cycle.flow.write_paused or cycle.disconnected)

    def __call__(self, data: bytes) -> None:
        """Only while it can. More than a client takes in is kept for it."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
