"""Answers that are choices: a whole, or chunks. The streamed text is the whole's text, for both are made from the same
deltas."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import orjson

from kvasir.router.openai.best_of import best_choices
from kvasir.router.openai.envelope import Envelope, Shape, Usage
from kvasir.router.openai.errors import error_body, log_fault
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.sse import DONE, event
from kvasir.router.text.parts import Content, Part

_Frame = tuple[bytes, bytes]  # what stands before and behind a chunk's text
_FEW_POSITIONS = 500  # whose logprobs are written on the event loop
_SOME_TEXT = uuid.uuid4().hex  # stands nowhere else in a chunk


class ChoicesAnswer:
    """An `Answer`.

    Most deltas are nothing but a choice's next text. What is around the text of a chunk is the same each time, so it is
    written once, as the shape would write it.
    """

    __slots__ = (
        "_envelope",
        "_frames",
        "_has_begun",
        "_is_text_alone",
        "_opened",
        "_shape",
        "_tells_usage",
        "_usage",
        "_usages",
    )

    num_openings = 0

    def __init__(self, envelope: Envelope, shape: Shape) -> None:
        self._envelope = envelope
        self._shape = shape
        self._usage = Usage(sum(envelope.prompt_lengths))
        self._usages: dict[int, Usage] = {}  # by choice
        self._tells_usage = envelope.include_usage  # in a stream
        self._opened: set[int] = set()
        self._frames: dict[int, _Frame] = {}  # by choice
        self._has_begun = False
        self._is_text_alone = not (shape.says_more_than_text or envelope.continuous_usage)

    @property
    def response_id(self) -> str:
        return self._envelope.response_id

    async def whole(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        envelope, shape = self._envelope, self._shape
        num_sequences = envelope.num_sequences * len(envelope.prompt_lengths)
        sequences: dict[int, list[ChoiceDelta]] = {index: [] for index in range(num_sequences)}
        async for delta in deltas:
            self._usage.add(delta)
            sequences[delta.index].append(delta)
        best = best_choices(sequences, envelope.num_sequences, envelope.num_choices)
        if sum(map(_num_scored, best.values())) <= _FEW_POSITIONS:
            choices = self._whole_choices(best)
        else:  # other streams go on meanwhile
            choices = await asyncio.to_thread(self._whole_choices, best)
        return envelope.around(shape.whole_object, choices) | {"usage": self._usage.as_dict()} | shape.extra

    def _whole_choices(self, best: Mapping[int, list[ChoiceDelta]]) -> list[dict[str, Any]]:
        return [self._shape.whole(index, of_choice) for index, of_choice in best.items()]

    async def events(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        """No finish reason is made up for an error, no [DONE] follows it."""
        try:
            async for delta in deltas:
                for one in self.events_of(delta):
                    yield one
        except Exception as error:
            log_fault(error)
            yield event(error_body(error))
            return
        if self._tells_usage:
            yield event(self._envelope.around(self._shape.chunk_object, []) | {"usage": self._usage.as_dict()})
        yield DONE

    def events_of(self, delta: ChoiceDelta) -> list[bytes]:
        if self._tells_usage:
            self._usage.add(delta)
        frame = self._frames.get(delta.index)
        if frame is not None and delta.finish_reason is None:
            text = delta.text if delta.parts is None else _only_text(delta.parts)
            if text is not None:
                return [frame[0] + orjson.dumps(text) + frame[1]] if text else []
        events: list[bytes] = []
        if delta.index not in self._opened:
            openings = self._shape.openings(delta)
            self._opened |= {delta.index, *(opening["index"] for opening in openings)}
            events += map(self._chunk, openings)
        if self._envelope.continuous_usage:
            self._usage_of(delta.index).add(delta)
        if piece := self._shape.piece(delta):
            events.append(self._chunk(piece))
            if self._is_text_alone and frame is None:
                self._frames[delta.index] = self._frame(delta.index)
        if delta.finish_reason is not None:
            events.append(self._chunk(self._shape.closing(delta)))
        return events

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        content = self._envelope.around(self._shape.chunk_object, [choice])
        if self._tells_usage:
            content["usage"] = self._usage_of(choice["index"]).as_dict() if self._envelope.continuous_usage else None
        if not self._has_begun:
            self._has_begun = True
            content |= self._shape.extra
        return event(content)

    def _usage_of(self, index: int) -> Usage:
        """A choice's own, as it is told all along, beside its prompt's tokens; that of all is told at the end."""
        if index not in self._usages:
            envelope = self._envelope
            self._usages[index] = Usage(envelope.prompt_lengths[index // envelope.num_choices])
        return self._usages[index]

    def _frame(self, index: int) -> _Frame:
        """Of the choice's chunks; `_chunk` has been called before."""
        piece = self._shape.piece(ChoiceDelta(index, _SOME_TEXT, (), (), None, None))
        assert piece is not None, "a text is always shown"
        before, _, behind = self._chunk(piece).partition(orjson.dumps(_SOME_TEXT))
        return before, behind


def _num_scored(of_choice: Sequence[ChoiceDelta]) -> int:
    """Positions with logprobs: of the prompt, which come with the first delta, and of the answer."""
    return len(of_choice[0].prompt_logprobs) + sum(len(delta.logprobs) for delta in of_choice)


def _only_text(parts: Sequence[Part]) -> str | None:
    """None: there is more to it."""
    if all(type(part) is Content for part in parts):
        return "".join(part.text for part in parts if type(part) is Content)
    return None
