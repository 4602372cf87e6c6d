"""One request's answer, as a whole or as a stream of chunks. The streamed text is the whole's text, for both are made
from the same deltas."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.router.metrics import RequestRecord
from kvasir.router.openai.best_of import best_choices
from kvasir.router.openai.errors import HttpError, current_request_id, error_body, status_of
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.sse import DONE, event

log = logging.getLogger(__name__)


class Shape(Protocol):
    """How choices of an endpoint look."""

    whole_object: str
    chunk_object: str
    extra: dict[str, Any]  # beside the choices

    def opening(self, first: ChoiceDelta) -> dict[str, Any] | None:
        """The choice's first chunk, before any text; `first` is the delta that follows."""
        ...

    def piece(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """None: nothing of the delta is to be shown."""
        ...

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        """The choice's last chunk, after all text: a client that stops reading here has lost nothing."""
        ...

    def whole(self, index: int, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        """`index` is the choice's own, whatever its deltas say."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What is around the choices."""

    response_id: str
    created: int
    model: str
    prompt_lengths: tuple[int, ...]  # in tokens
    num_choices: int  # of each prompt, in their order
    num_sequences: int  # of each prompt, of which those are the best
    include_usage: bool = False
    continuous_usage: bool = False

    def around(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class Usage:
    def __init__(self, envelope: Envelope) -> None:
        self._num_prompt_tokens = sum(envelope.prompt_lengths)
        self._num_completion_tokens = 0
        self._num_reasoning_tokens = 0
        self._num_cached_tokens = 0

    def add(self, delta: ChoiceDelta) -> None:
        self._num_completion_tokens += len(delta.token_ids)
        self._num_reasoning_tokens += delta.num_reasoning_tokens
        self._num_cached_tokens += delta.num_cached_tokens or 0  # said once for each prompt

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens},
        }
        if self._num_reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage


class Answer(Protocol):
    """What is made of the deltas."""

    @property
    def response_id(self) -> str: ...

    async def whole(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]: ...

    def events(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        """An error ends them as an event of its own."""
        ...


@dataclass(frozen=True, slots=True)
class ChoicesAnswer:
    envelope: Envelope
    shape: Shape

    @property
    def response_id(self) -> str:
        return self.envelope.response_id

    async def whole(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        return await whole_answer(self.envelope, self.shape, deltas)

    def events(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        return chunks(self.envelope, self.shape, deltas)


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


async def chunks(envelope: Envelope, shape: Shape, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
    """Events. An error ends the stream as an event of its own: no finish reason is made up, no [DONE] follows."""
    usage = Usage(envelope)
    opened: set[int] = set()
    extra = shape.extra  # on the first chunk only

    def chunk(choice: dict[str, Any]) -> bytes:
        content = envelope.around(shape.chunk_object, [choice])
        if envelope.include_usage:
            content["usage"] = usage.as_dict() if envelope.continuous_usage else None
        return event(content | extra)

    try:
        async for delta in deltas:
            usage.add(delta)
            if delta.index not in opened:
                opened.add(delta.index)
                if opening := shape.opening(delta):
                    yield chunk(opening)
                    extra = {}
            if piece := shape.piece(delta):
                yield chunk(piece)
            if delta.finish_reason is not None:
                yield chunk(shape.closing(delta.index, delta.finish_reason))
    except Exception as error:
        if status_of(error) == 500:
            log.exception("request %s failed in mid-stream", current_request_id.get())
        yield event(error_body(error))
        return
    if envelope.include_usage:
        yield event(envelope.around(shape.chunk_object, []) | {"usage": usage.as_dict()})
    yield DONE


async def recorded(
    generation: AsyncGenerator[ChoiceDelta, None], record: RequestRecord, envelope: Envelope
) -> AsyncGenerator[ChoiceDelta, None]:
    """The same deltas; how they went is in the metrics afterwards."""
    outcome, seen, served_by = "abort", False, ""
    reasons: set[str] = set()
    try:
        async with aclosing(generation) as deltas:
            async for delta in deltas:
                if not seen:
                    record.prompt(sum(envelope.prompt_lengths))
                    seen = True
                if delta.num_cached_tokens:
                    record.cached(delta.num_cached_tokens)
                record.tokens(delta.index, len(delta.token_ids))
                if delta.served_by != served_by:
                    served_by = delta.served_by
                    record.served(envelope.response_id, served_by)
                if delta.finish_reason is not None:
                    reasons.add(delta.finish_reason)
                yield delta
        outcome = "length" if "length" in reasons else "stop"
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
