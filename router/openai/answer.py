"""What is made of the deltas of one request: an answer, as a whole or as a stream, and what of it is counted."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.router.metrics import RequestRecord
from kvasir.router.openai.envelope import Envelope
from kvasir.router.openai.errors import HttpError
from kvasir.router.openai.generation import ChoiceDelta


class AnswerRecord:
    """What of an answer's deltas is to be seen in the metrics."""

    __slots__ = ("_envelope", "_has_begun", "_is_cut", "_record", "_served_by", "is_muted")

    def __init__(self, record: RequestRecord, envelope: Envelope) -> None:
        self._record = record
        self._envelope = envelope
        self._has_begun = False
        self._served_by = ""
        self._is_cut = False
        self.is_muted = False  # what comes has been counted before

    def add(self, delta: ChoiceDelta) -> None:
        record = self._record
        if not self.is_muted:
            if not self._has_begun:
                record.prompt(sum(self._envelope.prompt_lengths))
            if delta.num_cached_tokens:
                record.cached(delta.num_cached_tokens)
            record.tokens(delta.index, len(delta.token_ids))
        self._has_begun = True
        if delta.served_by != self._served_by:
            self._served_by = delta.served_by
            record.served(self._envelope.response_id, delta.served_by)
        self._is_cut |= delta.finish_reason == "length"

    async def recorded(self, generation: AsyncGenerator[ChoiceDelta]) -> AsyncGenerator[ChoiceDelta]:
        """The same deltas; how they went is in the metrics afterwards."""
        outcome = "abort"
        try:
            async with aclosing(generation) as deltas:
                async for delta in deltas:
                    self.add(delta)
                    yield delta
            outcome = "length" if self._is_cut else "stop"
        except Exception as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._record.end(outcome)


class Answer(Protocol):
    """What is made of the deltas of one request."""

    num_openings: int  # events that come before any of a delta

    @property
    def response_id(self) -> str: ...

    async def whole(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]: ...

    def events(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        """An error ends them as an event of its own."""
        ...

    def events_of(self, delta: ChoiceDelta) -> list[bytes]:
        """Those of one delta, in its turn: what `events` makes of each."""
        ...


def outcome_of(error: Exception) -> str:
    if isinstance(error, HttpError):
        return "overloaded" if error.status == 429 else "invalid"
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "overloaded" if isinstance(error, Overloaded) else "error"
