"""One request's answer, as a whole or as a stream of chunks. The streamed text is the whole's text, for both are made
from the same deltas."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.router.metrics import RequestRecord
from kvasir.router.openai.best_of import best_choices
from kvasir.router.openai.chunks import Chunks
from kvasir.router.openai.envelope import Envelope, Shape, Usage
from kvasir.router.openai.errors import HttpError, error_body, log_fault
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.sse import event


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

    @property
    def outcome(self) -> str:
        """Of one that has come to its end."""
        return "length" if self._is_cut else "stop"

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

    def end(self, outcome: str) -> None:
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


class ChoicesAnswer:
    __slots__ = ("_chunks", "_envelope", "_shape")

    num_openings = 0

    def __init__(self, envelope: Envelope, shape: Shape) -> None:
        self._envelope = envelope
        self._shape = shape
        self._chunks = Chunks(envelope, shape)

    @property
    def response_id(self) -> str:
        return self._envelope.response_id

    async def whole(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        return await whole_answer(self._envelope, self._shape, deltas)

    def events_of(self, delta: ChoiceDelta) -> list[bytes]:
        return self._chunks.of(delta)

    async def events(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        """No finish reason is made up for an error, no [DONE] follows it."""
        try:
            async for delta in deltas:
                for one in self._chunks.of(delta):
                    yield one
        except Exception as error:
            log_fault(error)
            yield event(error_body(error))
            return
        for one in self._chunks.end():
            yield one


async def whole_answer(envelope: Envelope, shape: Shape, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
    usage = Usage(envelope)
    num_sequences = envelope.num_sequences * len(envelope.prompt_lengths)
    sequences: dict[int, list[ChoiceDelta]] = {index: [] for index in range(num_sequences)}
    async for delta in deltas:
        usage.add(delta)
        sequences[delta.index].append(delta)
    best = best_choices(sequences, envelope.num_sequences, envelope.num_choices)
    choices = [shape.whole(index, of_choice) for index, of_choice in best.items()]
    return envelope.around(shape.whole_object, choices) | {"usage": usage.as_dict()} | shape.extra


async def recorded(
    generation: AsyncGenerator[ChoiceDelta, None], record: AnswerRecord
) -> AsyncGenerator[ChoiceDelta, None]:
    """The same deltas; how they went is in the metrics afterwards."""
    outcome = "abort"
    try:
        async with aclosing(generation) as deltas:
            async for delta in deltas:
                record.add(delta)
                yield delta
        outcome = record.outcome
    except Exception as error:
        outcome = outcome_of(error)
        raise
    finally:
        record.end(outcome)


def outcome_of(error: Exception) -> str:
    if isinstance(error, HttpError):
        return "overloaded" if error.status == 429 else "invalid"
    if isinstance(error, InvalidRequest):
        return "invalid"
    return "overloaded" if isinstance(error, Overloaded) else "error"
