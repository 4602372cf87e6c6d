"""What is noted of a resumable stream outside of the process that streams it: a head before its first token, then a
line for each delta. Whoever takes these goes on with it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from kvasir.common.tokens import pack_tokens, unpack_tokens
from kvasir.proto import workers_pb2 as pb
from kvasir.router.types import PositionLogprobs, RoutedRequest, TokenDelta


class StreamLog(Protocol):
    """Of one stream. What fails here costs the stream its second life, and nothing else."""

    @property
    def branch(self) -> str:
        """Empty while whoever goes on with the stream goes on behind what its client has been told; else a name for
        what is told from now on, which only we have."""
        ...

    async def begin(self, requests: Sequence[RoutedRequest]) -> None:
        """One a prompt."""
        ...

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

    @classmethod
    def of(cls, response_id: str, head: pb.StreamHead) -> "StreamOrigin":
        return cls(
            response_id=response_id,
            created=head.created,
            endpoint=head.endpoint,
            body=head.body,
            timeout_s=head.timeout_s if head.HasField("timeout_s") else None,
        )

    def head(self, requests: Sequence[RoutedRequest], grace_s: float) -> pb.StreamHead:
        """`requests`: one a prompt."""
        first, *further = map(_prompt, requests)
        return pb.StreamHead(
            endpoint=self.endpoint,
            body=self.body,
            created=self.created,
            timeout_s=self.timeout_s,
            grace_s=grace_s,
            seed=first.seed,
            max_tokens=first.max_tokens,
            prompt_token_ids=first.prompt_token_ids,
            further_prompts=further,
        )


def _prompt(request: RoutedRequest) -> pb.StreamPrompt:
    sampling, token_ids = request.sampling, pack_tokens(request.prompt_token_ids)
    return pb.StreamPrompt(seed=sampling.seed, max_tokens=sampling.max_tokens, prompt_token_ids=token_ids)


@dataclass(frozen=True, slots=True)
class Asked:
    """What nodes were asked for one prompt, and what another process cannot know."""

    seed: int
    max_tokens: int
    prompt_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, prompt: pb.StreamHead | pb.StreamPrompt) -> "Asked":
        return cls(prompt.seed, prompt.max_tokens, unpack_tokens(prompt.prompt_token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStream:
    """One whose process has died; whoever has it goes on with it, or gives it back."""

    origin: StreamOrigin
    asked: Sequence[Asked]  # one a prompt
    deltas: list[TokenDelta]
    log: StreamLog
    last_event: int  # that the client has

    @classmethod
    def of(
        cls, origin: StreamOrigin, head: pb.StreamHead, lines: bytes, log: StreamLog, last_event: int
    ) -> "TakenStream":
        """ValueError or TypeError for lines that another version of this has written."""
        asked = [Asked.of(head), *map(Asked.of, head.further_prompts)]
        return cls(origin=origin, asked=asked, deltas=deltas_of(lines), log=log, last_event=last_event)


class Notes(Protocol):
    """Where the streams of one process are noted, and those of others found."""

    def new_log(self, owner: str, origin: StreamOrigin, grace_s: float) -> StreamLog: ...

    async def take(self, owner: str, response_id: str, last_event: int, endpoint: str) -> TakenStream | bool:
        """From now on it is ours. If there is none for us: whether there may be one in a moment."""
        ...

    async def close(self) -> None: ...


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
