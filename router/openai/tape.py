"""What a resumable stream is made of: tokens. Noted outside of the process that streams them before its client sees
them, so that another process can go on with the same events, should this one die.

Events follow from tokens, and from how they came together; that is noted too, so their numbers stay what they were.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import orjson

from kvasir.router.openai.answer import AnswerRecord
from kvasir.router.types import Continued, PositionLogprobs, Reader, RoutedRequest, Source, TokenDelta

_MANY = 32  # replayed in one turn


class StreamLog(Protocol):
    """Of one stream. What fails here costs the stream its second life, and nothing else."""

    async def begin(self, request: RoutedRequest) -> None: ...

    async def add(self, delta: TokenDelta) -> None:
        """Returns when it is safe."""
        ...

    def forget(self) -> None:
        """Nobody goes on with it."""
        ...

    def give_back(self) -> None:
        """Somebody else may go on with it: we cannot."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrigin:
    """What an answer has from its beginning, and keeps wherever it goes on."""

    response_id: str
    created: int  # seconds since 1970
    endpoint: str = ""
    body: bytes = b""  # as the client sent it
    timeout_s: float | None = None  # of the whole answer, from `created` on


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStream:
    """One whose process has died; whoever has it goes on with it, or gives it back."""

    origin: StreamOrigin
    seed: int
    max_tokens: int
    prompt_token_ids: tuple[int, ...]
    deltas: list[TokenDelta]
    log: StreamLog
    last_event: int  # that the client has


class Tape:
    """The tokens of one prompt, noted and replayed where that is asked for before the first is."""

    def __init__(self, source: Source, record: AnswerRecord) -> None:
        self._source = source
        self._record = record
        self._log: StreamLog | None = None
        self._taken: TakenStream | None = None

    def note_to(self, log: StreamLog) -> None:
        self._log = log

    def go_on_with(self, taken: TakenStream) -> None:
        self._taken, self._log = taken, taken.log

    def generate(self, request: RoutedRequest, reader: Reader | None = None) -> AsyncGenerator[TokenDelta, None]:
        """See `types.Source`."""
        if self._log is None:
            return cast(AsyncGenerator[TokenDelta, None], self._source.generate(request, reader))
        if self._taken is None:
            return self._noted(request, reader or Reader(), self._log)
        return self._continued(request, reader or Reader(), self._taken)

    async def _noted(self, request: RoutedRequest, reader: Reader, log: StreamLog) -> AsyncGenerator[TokenDelta, None]:
        await log.begin(request)
        async with aclosing(self._live(request, reader, log)) as deltas:
            async for delta in deltas:
                yield delta

    async def _continued(
        self, request: RoutedRequest, reader: Reader, taken: TakenStream
    ) -> AsyncGenerator[TokenDelta, None]:
        """What was asked of nodes then is asked of them again: a template may know what day it is."""
        outputs: list[list[int]] = [[] for _ in range(request.num_sequences)]
        ended: set[int] = set()
        reader.listen(ended.add)  # by a stop string
        self._record.is_muted = True
        for number, delta in enumerate(taken.deltas, start=1):
            outputs[delta.sequence] += delta.token_ids
            if delta.finish_reason is not None:
                ended.add(delta.sequence)
            yield delta
            if number % _MANY == 0:
                await asyncio.sleep(0)
        self._record.is_muted = False
        if len(ended) == request.num_sequences:
            return
        sampling = replace(request.sampling, seed=taken.seed, max_tokens=taken.max_tokens)
        request = replace(request, prompt_token_ids=taken.prompt_token_ids, sampling=sampling)
        if taken.deltas:
            continued = Continued(tuple(map(tuple, outputs)), frozenset(ended))
            request = replace(request, continued=continued)
        async with aclosing(self._live(request, reader, taken.log)) as deltas:
            async for delta in deltas:
                yield delta

    async def _live(self, request: RoutedRequest, reader: Reader, log: StreamLog) -> AsyncGenerator[TokenDelta, None]:
        source = cast(AsyncGenerator[TokenDelta, None], self._source.generate(request, reader))
        try:
            async with aclosing(source) as deltas:
                async for delta in deltas:
                    if request.continued is not None:  # this has been said
                        delta = delta._replace(prompt_logprobs=(), num_cached_tokens=None)
                    await log.add(delta)
                    yield delta
        except Exception:  # the client is told how it ended, and that is no token
            log.forget()
            raise


def line_of(delta: TokenDelta) -> bytes:
    return orjson.dumps(tuple(delta), option=orjson.OPT_APPEND_NEWLINE)


def deltas_of(lines: bytes) -> list[TokenDelta]:
    return [_delta(*orjson.loads(line)) for line in lines.splitlines()]


def _delta(
    sequence: int,
    token_ids: list[int],
    finish_reason: str | None,
    logprobs: list[dict[str, Any]],
    prompt_logprobs: list[dict[str, Any]],
    num_cached_tokens: int | None,
    served_by: str,
) -> TokenDelta:
    return TokenDelta(
        sequence=sequence,
        token_ids=tuple(token_ids),
        finish_reason=finish_reason,
        logprobs=tuple(_positions(logprobs)),
        prompt_logprobs=tuple(_positions(prompt_logprobs)),
        num_cached_tokens=num_cached_tokens,
        served_by=served_by,
    )


def _positions(values: Iterable[dict[str, Any]]) -> Iterator[PositionLogprobs]:
    """JSON has no infinity: what has no value was the lowest."""
    for value in values:
        entries = ((token_id, -math.inf if logprob is None else logprob) for token_id, logprob in value["entries"])
        yield PositionLogprobs(tuple(entries), value["rank"])
