"""A dispatching half that plays a script, so that the HTTP half can be tested without any node."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from kvasir.common.errors import NodeUnavailable
from kvasir.common.seeds import sequence_seed
from kvasir.router.types import ClusterLimits, PositionLogprobs, Reader, RoutedRequest, TokenDelta

Step = TokenDelta | Exception | float  # a delta, something that is raised, or a wait in seconds


@dataclass
class FakeDispatcher:
    """`script` gives the steps for each request, which are kept for the test to look at."""

    limits_now: ClusterLimits
    script: Callable[[RoutedRequest], Sequence[Step]]
    is_ready: bool = True
    has_nodes: bool = True
    requests: list[RoutedRequest] = field(default_factory=list)
    num_running: int = 0
    num_closed_early: int = 0
    takes: bool = False  # some deltas are given to their reader at once
    num_taken: int = 0  # deltas that their reader has taken at once
    stopped: list[int] = field(default_factory=list)  # sequences that their reader wanted no more of

    def has_joined(self, num_prefill: int, num_decode: int) -> bool:
        return num_prefill <= 1 and num_decode <= 1

    def limits(self) -> ClusterLimits:
        if not self.has_nodes:
            raise NodeUnavailable("no decode node is here")
        return self.limits_now

    async def generate(self, request: RoutedRequest, reader: Reader | None = None) -> AsyncGenerator[TokenDelta, None]:
        """Several sequences take turns, step by step. Where it `takes`, tokens go either way."""
        way = random.Random(len(self.requests))
        self.requests.append(request)
        self.num_running += 1
        open_sequences = set(range(request.num_sequences))
        if reader is not None:
            reader.listen(self.stopped.append)
            reader.listen(open_sequences.discard)
        try:
            for sequence, step in self._steps(request):
                if sequence not in open_sequences:
                    continue
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TokenDelta):
                    if step.finish_reason is not None:
                        open_sequences.remove(sequence)
                    if (
                        self.takes
                        and way.random() < 0.7
                        and reader is not None
                        and reader.take is not None
                        and reader.take(step)
                    ):
                        reader.num_tokens_taken += len(step.token_ids)
                        self.num_taken += 1
                    else:
                        yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.num_running -= 1
            self.num_closed_early += bool(open_sequences)

    def _steps(self, request: RoutedRequest) -> Iterator[tuple[int, Step]]:
        scripts = [self.script(_alone(request, sequence)) for sequence in range(request.num_sequences)]
        for steps in zip_longest(*scripts):
            for sequence, step in enumerate(steps):
                if isinstance(step, TokenDelta):
                    yield sequence, _said_once(step._replace(sequence=sequence))
                elif step is not None:
                    yield sequence, step


def _alone(request: RoutedRequest, sequence: int) -> RoutedRequest:
    seed = sequence_seed(request.sampling.seed, sequence)
    return replace(request, num_sequences=1, sampling=replace(request.sampling, seed=seed))


def _said_once(delta: TokenDelta) -> TokenDelta:
    """What is said with the first delta of a request is not said of its other sequences."""
    return delta._replace(num_cached_tokens=None, prompt_logprobs=()) if delta.sequence else delta


def play(
    token_ids: Sequence[int],
    request: RoutedRequest,
    *,
    finish_reason: str = "stop",
    tokens_a_step: int = 1,
    pause_s: float = 0.0,
    num_cached_tokens: int = 0,
) -> list[Step]:
    """These tokens, cut off at max_tokens and at the first stop token, as an engine would."""
    stop_token_ids = request.sampling.stop_token_ids
    end = next((index + 1 for index, token_id in enumerate(token_ids) if token_id in stop_token_ids), len(token_ids))
    kept = tuple(token_ids[: min(end, request.sampling.max_tokens)])
    if not kept:
        return [
            TokenDelta(
                sequence=0,
                token_ids=(),
                finish_reason="length",
                num_cached_tokens=num_cached_tokens,
                prompt_logprobs=_prompt_logprobs(request),
            )
        ]
    if kept[-1] not in stop_token_ids and len(kept) == request.sampling.max_tokens:
        finish_reason = "length"
    steps: list[Step] = []
    for start in range(0, len(kept), tokens_a_step):
        new = kept[start : start + tokens_a_step]
        steps.append(
            TokenDelta(
                sequence=0,
                token_ids=new,
                finish_reason=finish_reason if start + tokens_a_step >= len(kept) else None,
                logprobs=tuple(_logprobs(token_id, request) for token_id in new),
                num_cached_tokens=num_cached_tokens if start == 0 else None,
                prompt_logprobs=_prompt_logprobs(request) if start == 0 else (),
            )
        )
        if pause_s:
            steps.append(pause_s)
    return steps


def _prompt_logprobs(request: RoutedRequest) -> tuple[PositionLogprobs, ...]:
    """The same, from the second token on."""
    count = request.sampling.prompt_logprobs
    if count is None:
        return ()
    as_output = replace(request, sampling=replace(request.sampling, logprobs=count))
    return tuple(_logprobs(token_id, as_output) for token_id in request.prompt_token_ids[1:])


def _logprobs(token_id: int, request: RoutedRequest) -> PositionLogprobs:
    """The token is the second best: -1.5; the best ones are its neighbours."""
    count = request.sampling.logprobs or 0
    best = tuple(((token_id + offset) % 256, -0.5 - offset) for offset in range(1, count + 1))
    return PositionLogprobs(entries=((token_id, -1.5), *best), rank=2)
