"""A smaller model with the same tokenizer runs ahead, over a KV cache of its own.

Each request has a shadow here: the same tokens and sampling, other blocks. The shadow draws with the request's own
random numbers, so where the two models agree on a distribution they draw the same token from it.

    tokens       0 ............ confirmed ........ + drafts       confirmed: the request's own
    KV           |<- computed here ->|<- computed, but for the last draft ->|
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvasir.engine.block_tables import BlockTables
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.request import Phase, Request, RequestId
from kvasir.engine.step import Chunk, Sampled, StepPlan


@dataclass(eq=False, slots=True)
class _Shadow:
    real: Request
    own: Request  # between two calls: the confirmed tokens alone
    drafts: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The first token to be computed; the last one is, always, for its logits."""
        return min(self.own.num_computed_tokens, self.own.num_tokens - 1)


class DraftModel:
    """A `Proposer`. What it computes of a long prompt in one call is bounded; until then that request has no drafts."""

    def __init__(self, runner: ModelRunner, limits: Limits) -> None:
        self._runner = runner
        self._limits = limits
        self._tables = BlockTables(limits, b"")
        self._shadows: dict[RequestId, _Shadow] = {}  # the one used last comes last

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[RequestId, list[int]]:
        self._drop([key for key, shadow in self._shadows.items() if shadow.real.phase is Phase.FINISHED])
        most = {request.request_id: min(num, self._room(request)) for request, num in wanted}
        shadows = [self._shadow(request) for request, _ in wanted if most[request.request_id] > 0]
        budget = self._limits.max_num_batched_tokens
        chunks: list[Chunk] = []
        for shadow in shadows:
            end = shadow.own.num_tokens + most[shadow.own.request_id] - 1
            num_tokens = min(shadow.own.num_tokens - shadow.start, budget)
            if num_tokens and self._reserve(shadow.own, end, set(most)):
                chunks.append(Chunk(shadow.own, shadow.start, num_tokens))
                budget -= num_tokens
        self._run_ahead(chunks, most)
        drafted = {shadow.own.request_id: shadow.drafts for shadow in shadows if shadow.drafts}
        for shadow in shadows:
            del shadow.own.output_token_ids[len(shadow.real.output_token_ids) :]
        return {key: list(drafts) for key, drafts in drafted.items()}

    def check_invariant(self) -> None:
        """Every block is free, or held by a shadow."""
        self._tables.check_invariant([shadow.own for shadow in self._shadows.values()])

    def _run_ahead(self, chunks: list[Chunk], most: dict[RequestId, int]) -> None:
        """First what is missing, then token by token, all requests together."""
        while chunks:
            sampled = self._runner.execute(StepPlan(tuple(chunks)))
            following = []
            for chunk in chunks:
                own = chunk.request
                shadow = self._shadows[own.request_id]
                if not shadow.drafts:
                    self._tables.advance(own, chunk.end)
                if own.request_id in sampled and self._take(shadow, sampled[own.request_id], most[own.request_id]):
                    following.append(Chunk(own, own.num_tokens - 1, 1))
            chunks = following

    def _take(self, shadow: _Shadow, sampled: Sampled, most: int) -> bool:
        """True: and one more."""
        if not sampled.token_ids:
            return False
        token = sampled.token_ids[0]
        shadow.drafts.append(token)
        shadow.own.output_token_ids.append(token)
        return len(shadow.drafts) < most and token not in shadow.own.sampling.stop_token_ids

    def _room(self, request: Request) -> int:
        return min(self._limits.max_model_len, self._limits.num_blocks * self._limits.block_size) - request.num_tokens

    def _shadow(self, request: Request) -> _Shadow:
        """With the request's tokens of now; of those that were drafted here before, the K and V are kept."""
        shadow = self._shadows.pop(request.request_id, None)
        if shadow is not None and shadow.real is not request:
            self._tables.release(shadow.own)
            shadow = None
        if shadow is None:
            sampling = replace(request.sampling, grammar=None, logprobs=None, prompt_logprobs=None)
            own = Request(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=sampling,
                cache_salt=request.cache_salt,
            )
            shadow = _Shadow(request, own)
        self._shadows[request.request_id] = shadow
        own, drafts, shadow.drafts = shadow.own, shadow.drafts, []
        news = request.output_token_ids[len(own.output_token_ids) :]
        own.output_token_ids += news
        if not own.block_table:
            self._tables.begin(own, 0)
        elif drafts:
            self._tables.advance(own, own.num_computed_tokens + _num_equal(drafts[:-1], news))
        return shadow

    def _reserve(self, own: Request, num_tokens: int, in_use: set[RequestId]) -> bool:
        """Those that were not used for longest give way, but not to others of this call."""
        while not self._tables.reserve(own, num_tokens):
            victim = next((key for key in self._shadows if key not in in_use), None)
            if victim is None:
                self._tables.release(own)
                return False
            self._drop([victim])
        return True

    def _drop(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self._tables.release(self._shadows.pop(request_id).own)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """[1, 2, 3], [1, 2, 4, 5] -> 2"""
    num_equal = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        num_equal += 1
    return num_equal
