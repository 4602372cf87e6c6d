"""The short way of a token: from the node's message to the client's socket in one call.

The long way is by async generators and the response's task, which wait for each other at every step. Everything on it
that has a state (text, metrics, chunks, numbers of events) lives in objects that both ways use, so a token may go
either way; and it goes the short one only while the long one is waiting for it with nothing left to do. Ends and errors
always go the long way.
"""

from kvasir.router.http_chunks import ChunkWriter
from kvasir.router.openai.answer import Answer, AnswerRecord
from kvasir.router.openai.event_ids import Numbering
from kvasir.router.openai.generation import ChoicesReader
from kvasir.router.types import TokenDelta


class ShortWay:
    """Closed at first: somebody must say where it leads, and for how long; and not before a first delta has gone the
    long way, with whatever is sent in front of it."""

    __slots__ = ("_answer", "_choices", "_chunks", "_has_begun", "_numbering", "_record")

    def __init__(self, choices: ChoicesReader, record: AnswerRecord) -> None:
        self._choices = choices
        self._record = record
        self._answer: Answer
        self._numbering: Numbering
        self._has_begun = False
        self._chunks: ChunkWriter | None = None

    def through(self, answer: Answer, numbering: Numbering) -> None:
        """What makes events of deltas, and gives each its number. Before it is opened."""
        self._answer, self._numbering = answer, numbering

    def open(self, chunks: ChunkWriter) -> None:
        self._chunks = chunks

    def begin(self) -> None:
        """All that the first delta came to has been sent."""
        self._has_begun = True

    def close(self) -> None:
        self._chunks = None

    def take(self, delta: TokenDelta) -> bool:
        """Whether it has gone this way."""
        chunks = self._chunks
        if chunks is None or not self._has_begun or delta.finish_reason is not None or not chunks.can_write():
            return False
        choice = self._choices.read(delta)
        if choice is None:
            return True
        if choice.finish_reason is not None:
            self._choices.give_back(delta, choice)
            return False
        self._record.add(choice)
        events = self._answer.events_of(choice)
        if len(events) == 1:
            chunks.write(self._numbering.numbered(events[0]))
        elif events:
            chunks.write(b"".join(map(self._numbering.numbered, events)))
        return True
