"""Speculative decoding: tokens are proposed, and the next step verifies all of them at once.

    plan      | decode | decode | prompt ...      of the scheduler, as without speculation
    extended  | decode + drafts | decode | prompt ...

Drafts take what the plan has left over: of the step's tokens, of the free blocks above the watermark, and of those
only while nobody waits; what the scheduler lacks later it takes back. So nobody is preempted or delayed for a draft,
and a request's output does not depend on them.
"""

from collections.abc import Mapping
from dataclasses import replace

from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.request import Request, RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.speculation.payoff import Payoff, Track
from kvasir.engine.speculation.proposer import Proposer
from kvasir.engine.step import Chunk, Sampled, StepPlan


class Speculator:
    """Belongs to the engine's thread."""

    def __init__(
        self, proposer: Proposer, scheduler: Scheduler, num_speculative_tokens: int, payoff: Payoff | None = None
    ) -> None:
        self.payoff = payoff or Payoff()
        self._proposer = proposer
        self._scheduler = scheduler
        self._most = num_speculative_tokens
        self._tracks: dict[RequestId, Track] = {}

    def extend(self, plan: StepPlan) -> StepPlan:
        """The same plan, with drafts behind the chunks that decode."""
        decoding = [chunk for chunk in plan.chunks if _is_decoding(chunk)]
        if not decoding or (len(decoding) == len(plan.chunks) and self.payoff.costs.wants_plain(len(decoding))):
            return plan
        budget = self._scheduler.limits.max_num_batched_tokens - plan.num_tokens
        wanted = []
        for chunk in decoding:
            most = min(self._most, budget, self._room(chunk))
            most = self.payoff.num_drafts(self._track(chunk.request), len(decoding), most)
            if most > 0:
                wanted.append((chunk.request, most))
                budget -= most
        proposed = self._proposer.propose(wanted) if wanted else {}
        if not proposed:
            return plan
        return StepPlan(tuple(self._with_drafts(chunk, proposed) for chunk in plan.chunks))

    def learn(self, plan: StepPlan, sampled: Mapping[RequestId, Sampled], step_s: float) -> None:
        """What has become of the drafts, and how long the step took with them."""
        num_decoding = num_drafts = 0
        for chunk in plan.chunks:
            is_decoding = chunk.num_tokens - chunk.num_drafts == 1
            num_decoding += is_decoding
            num_drafts += chunk.num_drafts
            if chunk.num_drafts:
                num_kept = max(len(sampled[chunk.request.request_id].token_ids) - 1, 0)
                self.payoff.note_drafts(self._track(chunk.request), chunk.num_drafts, num_kept)
            elif is_decoding:
                self.payoff.note_without(self._track(chunk.request))
        if num_decoding and num_decoding == len(plan.chunks):
            self.payoff.costs.note(num_decoding, num_drafts, step_s)
        if len(self._tracks) > 2 * len(self._scheduler.requests) + 64:
            self._tracks = {key: track for key, track in self._tracks.items() if key in self._scheduler.requests}

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            track = self._tracks[request.request_id] = self.payoff.new_track()
        return track

    def _room(self, chunk: Chunk) -> int:
        """How many drafts could be kept, with the request's own token behind them."""
        request = chunk.request
        num_tokens_left = request.sampling.max_tokens - len(request.output_token_ids)
        return min(num_tokens_left, self._scheduler.max_total_tokens - request.num_tokens) - 1

    def _with_drafts(self, chunk: Chunk, proposed: Mapping[RequestId, list[int]]) -> Chunk:
        drafts = proposed.get(chunk.request.request_id)
        if not drafts:
            return chunk
        drafts = drafts[: self._num_reserved(chunk, len(drafts))]
        chunk.request.draft_token_ids = drafts
        return replace(chunk, num_tokens=chunk.num_tokens + len(drafts), num_drafts=len(drafts))

    def _num_reserved(self, chunk: Chunk, num_drafts: int) -> int:
        """For how many of them there are blocks now: those that the request has, then free ones nobody waits for."""
        tables, limits = self._scheduler.tables, self._scheduler.limits
        num_spare = tables.pool.num_free - int(limits.watermark * limits.num_blocks)
        if self._scheduler.waiting or num_spare < 0:
            num_spare = 0
        num_held = len(chunk.request.block_table)
        num_blocks = min(num_held + num_spare, num_blocks_for(chunk.end + num_drafts, limits.block_size))
        tables.reserve(chunk.request, num_blocks * limits.block_size)
        return min(num_drafts, num_blocks * limits.block_size - chunk.end)


def _is_decoding(chunk: Chunk) -> bool:
    """One token, of a request that samples for itself alone, and goes on here."""
    request = chunk.request
    return chunk.num_tokens == 1 and not request.hand_off and chunk.samplers == (request,)
