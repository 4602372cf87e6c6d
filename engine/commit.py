"""Booking what a step computed: tokens, finished requests, blocks to report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvasir.common.errors import NumericalError
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import (
    Admitted,
    Chunk,
    ComputedBlocks,
    Failed,
    PromptLogprobs,
    Sampled,
    SequenceOutput,
    StepPlan,
    StepResult,
)


class Ledger:
    """Collects what is to be told about a step, and counts what is told about all of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tables = scheduler.tables
        self._outputs: list[SequenceOutput] = []
        self._admitted: list[Admitted] = []
        self._passed_over: list[RequestId] = []
        self._computed: list[ComputedBlocks] = []
        self._failed: list[Failed] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self.num_prompt_tokens_computed = 0
        self.num_generation_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def is_empty(self) -> bool:
        return not any(self._collected)

    @property
    def _collected(self) -> tuple[list[Any], ...]:
        return (
            self._outputs,
            self._admitted,
            self._passed_over,
            self._computed,
            self._failed,
            self._prompt_logprobs,
        )

    def take_result(self, step: int) -> StepResult:
        """All that has been collected, once."""
        stored, dropped = self._tables.cache.take_events()
        result = StepResult(
            step,
            outputs=tuple(self._outputs),
            admitted=tuple(self._admitted),
            passed_over=tuple(self._passed_over),
            computed=tuple(self._computed),
            failed=tuple(self._failed),
            prompt_logprobs=tuple(self._prompt_logprobs),
            stored=stored,
            dropped=dropped,
        )
        for collected in self._collected:
            collected.clear()
        return result

    def note_newcomers(self, admitted: Sequence[Admitted], passed_over: Iterable[Request]) -> None:
        """Blocks of the admitted that were in the prefix cache are final already."""
        self._passed_over.extend(request.request_id for request in passed_over)
        self._admitted.extend(admitted)
        for one in admitted:
            self._report(one.request)

    def commit(self, plan: StepPlan, sampled: Mapping[RequestId, Sampled]) -> None:
        for chunk in plan.chunks:
            self._count(chunk)
            request, samplers = chunk.request, chunk.samplers
            if not all(sampled[one.request_id].is_finite for one in (request, *samplers) if one.request_id in sampled):
                self.fail(request, NumericalError("the model gave NaN or infinite logits"))
                continue
            self._score(chunk, sampled)
            num_kept = self._keep_drafts(chunk, sampled)
            self._tables.advance(request, chunk.end - chunk.num_drafts + num_kept)
            self._report(request)
            for fork in samplers:
                if fork is not request:
                    self._append(fork, sampled[fork.request_id])
            self._scheduler.fork(request)
            if request in samplers:
                self._append(request, sampled[request.request_id], num_kept)

    def fail(self, request: Request, error: Exception) -> None:
        """What its blocks hold may be the cause, so nobody else shall find them. Its forks fail with it."""
        self._tables.distrust(request)
        for one in (*request.forks, request):
            if one.request_id in self._scheduler.requests:
                self._scheduler.finish(one)
            self._failed.append(Failed(one.request_id, error))

    def end_if_too_long(self, request: Request) -> None:
        """For a request that has just been given tokens from elsewhere, and may have no room for another."""
        if request.output_token_ids and self._is_at_length(request):
            self._scheduler.cancel(request.request_id)
            self._outputs.append(SequenceOutput(request.request_id, (), FinishReason.LENGTH))

    def _score(self, chunk: Chunk, sampled: Mapping[RequestId, Sampled]) -> None:
        scored = chunk.scored
        if scored:
            request_id = chunk.request.request_id
            positions = sampled[request_id].prompt_logprobs
            self._prompt_logprobs.append(PromptLogprobs(request_id, scored.start + 1, positions))
            chunk.request.num_scored_tokens = scored.stop

    def _keep_drafts(self, chunk: Chunk, sampled: Mapping[RequestId, Sampled]) -> int:
        """How many were accepted: they are output now, and computed; none of them ends the request."""
        if not chunk.num_drafts:
            return 0
        request = chunk.request
        request.draft_token_ids = []
        kept = sampled[request.request_id].token_ids[:-1]
        request.output_token_ids += kept
        self.num_drafts += 1
        self.num_draft_tokens += chunk.num_drafts
        self.num_accepted_tokens += len(kept)
        return len(kept)

    def _append(self, request: Request, sampled: Sampled, num_kept: int = 0) -> None:
        """The first `num_kept` of the tokens are among the output already."""
        if request.sampling.max_tokens == 0:
            self._scheduler.finish(request)
            self._outputs.append(SequenceOutput(request.request_id, (), FinishReason.LENGTH))
            return
        if sampled.error is not None:
            self._scheduler.finish(request)
            self._failed.append(Failed(request.request_id, sampled.error))
            return
        request.output_token_ids += sampled.token_ids[num_kept:]
        self.num_generation_tokens += len(sampled.token_ids)
        reason = self._finish_reason(request, sampled.completes_grammar)
        if reason is not None:
            self._scheduler.finish(request)
        self._outputs.append(SequenceOutput(request.request_id, sampled.token_ids, reason, sampled.logprobs))

    def _finish_reason(self, request: Request, completes_grammar: bool) -> FinishReason | None:
        """A stop token is part of the output; not to show it is up to the reader."""
        if completes_grammar or request.output_token_ids[-1] in request.sampling.stop_token_ids:
            return FinishReason.STOP
        if self._is_at_length(request):
            return FinishReason.LENGTH
        return FinishReason.HANDED_OFF if request.hand_off else None

    def _is_at_length(self, request: Request) -> bool:
        """How long a sequence may grow here says nothing of the node that it is handed to."""
        if len(request.output_token_ids) >= request.sampling.max_tokens:
            return True
        return not request.hand_off and request.num_tokens >= self._scheduler.max_total_tokens

    def _report(self, request: Request) -> None:
        report = self._tables.report(request) if request.hand_off or request.reports_filled else None
        if report is not None:
            self._computed.append(report)

    def _count(self, chunk: Chunk) -> None:
        request = chunk.request
        self.num_prompt_tokens_computed += _overlap(chunk, len(request.prompt_token_ids))
        if not request.hand_off:  # a prefill node asks a store for what is there; the rest was never elsewhere
            self.num_recomputed_tokens += _overlap(chunk, request.num_awaited_tokens)


def _overlap(chunk: Chunk, num_tokens: int) -> int:
    """How many of the chunk's tokens are among the first `num_tokens`."""
    return max(0, min(chunk.end, num_tokens) - chunk.start)
