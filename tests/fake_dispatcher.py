"""A dispatching half that plays a script, so that the HTTP half can be tested without any node."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from kvasir.common.errors import NodeUnavailable
from kvasir.router.types import ClusterLimits, PositionLogprobs, RoutedRequest, TokenDelta

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

    def has_joined(self, num_prefill: int, num_decode: int) -> bool:
        return num_prefill <= 1 and num_decode <= 1

    def limits(self) -> ClusterLimits:
        if not self.has_nodes:
            raise NodeUnavailable("no decode node is here")
        return self.limits_now

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.num_running += 1
        has_finished = False
        try:
            for step in self.script(request):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, TokenDelta):
                    has_finished = step.finish_reason is not None
                    yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.num_running -= 1
            self.num_closed_early += not has_finished


def play(
    token_ids: Sequence[int],
    request: RoutedRequest,
    *,
    finish_reason: str = "stop",
    tokens_a_step: int = 1,
    pause_s: float = 0.0,
) -> list[Step]:
    """These tokens, cut off at max_tokens and at the first stop token, as an engine would."""
    stop_token_ids = request.sampling.stop_token_ids
    end = next((index + 1 for index, token_id in enumerate(token_ids) if token_id in stop_token_ids), len(token_ids))
    kept = tuple(token_ids[: min(end, request.sampling.max_tokens)])
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
                num_cached_tokens=0 if start == 0 else None,
            )
        )
        if pause_s:
            steps.append(pause_s)
    return steps


def _logprobs(token_id: int, request: RoutedRequest) -> PositionLogprobs:
    """The token is the second best: -1.5; the best ones are its neighbours."""
    count = request.sampling.logprobs or 0
    best = tuple(((token_id + offset) % 256, -0.5 - offset) for offset in range(1, count + 1))
    return PositionLogprobs(entries=((token_id, -1.5), *best), rank=2)
