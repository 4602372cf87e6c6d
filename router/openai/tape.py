"""What a resumable stream is made of: tokens. Noted outside of the process that streams them before its client sees
them, so that another process can go on with the same events, should this one die.

Events follow from tokens, and from how they came together; that is noted too, so their numbers stay what they were.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from kvasir.router.merge import merge
from kvasir.router.openai.answer import AnswerRecord
from kvasir.router.openai.errors import StreamNotKept
from kvasir.router.openai.stream_notes import Asked, StreamLog, TakenStream
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.types import Continued, Reader, RoutedRequest, TokenDelta

_MANY = 32  # replayed in one turn
_MAX_PENDING = 64  # tokens of all prompts together that nobody has taken yet


class Tape:
    """The tokens of one answer, noted and replayed where that is asked for before the first is. The sequences of its
    prompts are counted on from prompt to prompt, and come together in one order."""

    def __init__(self, source: TenantBackend, record: AnswerRecord) -> None:
        self._source = source
        self._record = record
        self._log: StreamLog | None = None
        self._taken: TakenStream | None = None
        self._is_behind: Callable[[], bool] = lambda: False

    def note_to(self, log: StreamLog) -> None:
        self._log = log

    def go_on_with(self, taken: TakenStream, is_behind: Callable[[], bool]) -> None:
        """`is_behind`: all that was noted has been replayed, and the client has seen more. Nobody can go on then."""
        self._taken, self._log, self._is_behind = taken, taken.log, is_behind

    def generate(
        self, requests: Sequence[RoutedRequest], readers: Sequence[Reader]
    ) -> AsyncGenerator[TokenDelta, None]:
        """See `types.Backend`; one of each a prompt."""
        if self._taken is not None:
            return self._continued(requests, readers, self._taken)
        parts = [_Part(at * one.num_sequences, one, readers[at]) for at, one in enumerate(requests)]
        return self._together(parts) if self._log is None else self._noted(parts, self._log, is_new=True)

    async def _continued(
        self, requests: Sequence[RoutedRequest], readers: Sequence[Reader], taken: TakenStream
    ) -> AsyncGenerator[TokenDelta, None]:
        num_sequences = requests[0].num_sequences
        replay = _Replay(num_sequences, len(requests))
        for at, reader in enumerate(readers):
            reader.listen(partial(replay.stopped, at))
        self._record.is_muted = True
        for number, delta in enumerate(taken.deltas, start=1):
            replay.add(delta)
            yield delta
            if number % _MANY == 0:
                await asyncio.sleep(0)
        self._record.is_muted = False
        asked = zip(requests, taken.asked, readers, strict=True)
        parts = [
            _Part(at * num_sequences, replay.going_on(at, request, one), reader)
            for at, (request, one, reader) in enumerate(asked)
            if not replay.has_ended(at)
        ]
        if not parts:
            return
        if self._is_behind():
            taken.log.forget()
            raise StreamNotKept
        async with aclosing(self._noted(parts, taken.log, is_new=False)) as deltas:
            async for delta in deltas:
                yield delta

    async def _noted(
        self, parts: "Sequence[_Part]", log: StreamLog, *, is_new: bool
    ) -> AsyncGenerator[TokenDelta, None]:
        if is_new:
            await log.begin([part.request for part in parts])
        try:
            async with aclosing(self._together(parts)) as deltas:
                async for delta in deltas:
                    await log.add(delta)
                    yield delta
        except Exception:  # the client is told how it ended, and that is no token
            log.forget()
            raise

    def _together(self, parts: "Sequence[_Part]") -> AsyncGenerator[TokenDelta, None]:
        """If one fails, so do all."""
        requests, readers = [part.request for part in parts], [part.reader for part in parts]
        if len(parts) == 1 and parts[0].first_sequence == 0 and parts[0].request.continued is None:
            return self._source.limited(requests, readers, self._source.generate(requests[0], readers[0]))
        tokens = [part.generate(self._source) for part in parts]
        return self._source.limited(requests, readers, tokens[0] if len(tokens) == 1 else merge(tokens, _MAX_PENDING))


@dataclass(frozen=True, slots=True)
class _Part:
    """One prompt's of an answer."""

    first_sequence: int
    request: RoutedRequest
    reader: Reader

    async def generate(self, source: TenantBackend) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(source.generate(self.request, self.reader)) as deltas:
            async for delta in deltas:
                if self.request.continued is not None:  # this has been said
                    delta = delta._replace(prompt_logprobs=(), num_cached_tokens=None)
                yield delta._replace(sequence=self.first_sequence + delta.sequence)


class _Replay:
    """How far an answer has come."""

    def __init__(self, num_sequences: int, num_prompts: int) -> None:
        self._num_sequences = num_sequences
        self._outputs: list[list[int]] = [[] for _ in range(num_sequences * num_prompts)]
        self._ended: set[int] = set()
        self._begun: set[int] = set()  # prompts

    def add(self, delta: TokenDelta) -> None:
        self._begun.add(delta.sequence // self._num_sequences)
        self._outputs[delta.sequence] += delta.token_ids
        if delta.finish_reason is not None:
            self._ended.add(delta.sequence)

    def stopped(self, prompt: int, sequence: int) -> None:
        """By a stop string."""
        self._ended.add(prompt * self._num_sequences + sequence)

    def has_ended(self, prompt: int) -> bool:
        return self._ended.issuperset(self._sequences(prompt))

    def going_on(self, prompt: int, request: RoutedRequest, asked: Asked) -> RoutedRequest:
        """What was asked of nodes then is asked of them again: a template may know what day it is."""
        sampling = replace(request.sampling, seed=asked.seed, max_tokens=asked.max_tokens)
        request = replace(request, prompt_token_ids=asked.prompt_token_ids, sampling=sampling)
        if prompt not in self._begun:
            return request
        sequences = self._sequences(prompt)
        outputs = tuple(tuple(self._outputs[one]) for one in sequences)
        ended = frozenset(one - sequences[0] for one in self._ended.intersection(sequences))
        return replace(request, continued=Continued(outputs, ended))

    def _sequences(self, prompt: int) -> range:
        return range(prompt * self._num_sequences, (prompt + 1) * self._num_sequences)
