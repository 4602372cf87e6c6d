"""The short way of a token: from the node's message to the client's socket in one call.

The long way is by async generators and the response's task, which wait for each other at every step. Everything on it
that has a state (text, metrics, chunks, numbers of events) lives in objects that both ways use, so a token may go
either way; and it goes the short one only while the long one is waiting for it with nothing left to do. Ends and errors
always go the long way.
"""

from collections.abc import Callable

from kvasir.router.http_chunks import ChunkWriter
from kvasir.router.openai.generation import ChoiceDelta, ChoicesReader
from kvasir.router.types import TokenDelta


class ShortWay:
    """Closed at first: somebody must say where it leads, and for how long; and not before a first delta has gone the
    long way, with whatever is sent in front of it."""

    __slots__ = ("_choices", "_events_of", "_has_begun", "_numbered", "_record", "_write_chunk")

    def __init__(self, choices: ChoicesReader, record: Callable[[ChoiceDelta], None]) -> None:
        self._choices = choices
        self._record = record
        self._events_of: Callable[[ChoiceDelta], list[bytes]] = lambda delta: []
        self._numbered: Callable[[bytes], bytes] = lambda event: event
        self._has_begun = False
        self._write_chunk: ChunkWriter | None = None

    def through(self, events_of: Callable[[ChoiceDelta], list[bytes]], numbered: Callable[[bytes], bytes]) -> None:
        """What makes events of deltas, and gives each its number."""
        self._events_of, self._numbered = events_of, numbered

    def open(self, write_chunk: ChunkWriter) -> None:
        self._write_chunk = write_chunk

    def begin(self) -> None:
        """All that the first delta came to has been sent."""
        self._has_begun = True

    def close(self) -> None:
        self._write_chunk = None

    def take(self, delta: TokenDelta) -> bool:
        """Whether it has gone this way."""
        write_chunk = self._write_chunk
        if write_chunk is None or not self._has_begun or delta.finish_reason is not None or not write_chunk.can_write():
            return False
        choice = self._choices.read(delta)
        if choice is None:
            return True
        if choice.finish_reason is not None:
            self._choices.give_back(delta, choice)
            return False
        self._record(choice)
        events = self._events_of(choice)
        if len(events) == 1:
            write_chunk.write(self._numbered(events[0]))
        elif events:
            write_chunk.write(b"".join(map(self._numbered, events)))
        return True
