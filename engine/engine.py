"""One engine: a scheduler, a model, and the step that joins them."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvasir.engine.blocks import BlockId
from kvasir.engine.commit import Ledger
from kvasir.engine.preemption import Way
from kvasir.engine.request import Matcher, Phase, Request, RequestId
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.speculation.speculator import Speculator
from kvasir.engine.stats import EngineStats, StepMetrics
from kvasir.engine.step import Sampled, StepPlan, StepResult

if TYPE_CHECKING:  # it brings a compiler of grammars
    from kvasir.engine.grammar import Grammars


class ModelRunner(Protocol):
    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        """Run one forward pass; the next token of each chunk's `samplers`, the logprobs of what is `scored`."""
        ...

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        """Make the target's content that of the source, before anything else is computed."""
        ...


class Engine:
    """Not thread-safe: one thread owns it. `AsyncEngine` is that thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        clock: Callable[[], float] = time.monotonic,
        grammars: "Grammars | None" = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.grammars = grammars  # None: requests must bring their matchers with them
        self.speculator = speculator
        self.on_newcomers: Callable[[StepResult], None] | None = None  # told before the forward pass, not after
        self.on_step: Callable[[StepMetrics], None] | None = None
        self.on_close: Callable[[], None] | None = None
        scheduler.tables.copy_block = model_runner.copy_block
        self._clock = clock
        self._ledger = Ledger(scheduler)
        self._step = 0
        self._times = scheduler.times
        self._queue_s: tuple[float, ...] = ()  # of those admitted in this step

    def step(self) -> StepResult:
        started_s = self._clock()
        self._step += 1
        plan = self._schedule(started_s)
        if self.speculator is not None:
            plan = self.speculator.extend(plan)
        sampled = self.model_runner.execute(plan) if plan.chunks else {}
        self._ledger.commit(plan, sampled)
        step_time_s = self._clock() - started_s
        if self.speculator is not None:
            self.speculator.learn(plan, sampled, step_time_s)
        self._observe(plan, step_time_s)
        return self._ledger.take_result(self._step)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. If not, nothing changes until one of the methods below is called."""
        return self.scheduler.has_work or not self._ledger.is_empty

    def check_fits(self, request: Request) -> None:
        """Raises InvalidRequest if it could not be served even alone. Any thread may ask."""
        self.scheduler.check_fits(request)

    def submit(self, request: Request) -> None:
        """With a grammar, and no matcher of it yet, it waits for `grammar_ready`."""
        self.scheduler.submit(request)

    def cancel(self, request_id: RequestId) -> None:
        self.scheduler.cancel(request_id)

    def block_loaded(self, request_id: RequestId, index: int, is_exact: bool = True) -> None:
        self.scheduler.block_loaded(request_id, index, is_exact)

    def loading_done(self, request_id: RequestId) -> None:
        self.scheduler.loading_done(request_id)

    def continue_with(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        request = self.scheduler.continue_with(request_id, list(token_ids))
        if request is not None:
            self._ledger.end_if_too_long(request)

    def grammar_ready(self, request_id: RequestId, new_matcher: Callable[[], Matcher]) -> None:
        self.scheduler.grammar_ready(request_id, new_matcher)

    def release_blocks(self, block_ids: Sequence[BlockId]) -> None:
        self.scheduler.release_blocks(block_ids)

    def close(self) -> None:
        """Let go of processes and threads. No step may follow."""
        if self.grammars is not None:
            self.grammars.close()
        if self.on_close is not None:
            self.on_close()

    def check_invariants(self) -> None:
        """Every block is free or held, exactly; and each request owns what its phase says."""
        scheduler = self.scheduler
        scheduler.tables.check_invariant(scheduler.requests.values())
        for phase, queue in (
            (Phase.WAITING, scheduler.waiting),
            (Phase.LOADING, scheduler.loading),
            (Phase.RUNNING, scheduler.running),
        ):
            assert all(request.phase is phase for request in queue), f"{phase} queue holds others"
        following = [fork for request in scheduler.requests.values() for fork in request.forks]
        assert all(fork.phase is Phase.FOLLOWING for fork in following), "forks that do not follow"
        idle = (*scheduler.waiting, *following)
        assert not any(request.block_table for request in idle), "a waiting request holds blocks"
        assert not any(request.draft_token_ids for request in scheduler.requests.values()), "drafts outlive their step"
        seated = (*scheduler.loading, *scheduler.running)
        assert not any(request.saved for request in seated), "what is here again is still on the host"
        assert len(scheduler.running) + len(scheduler.loading) <= scheduler.limits.max_num_seqs, "too many seats"
        num_queued = len(idle) + len(scheduler.loading) + len(scheduler.running)
        assert num_queued == len(scheduler.requests), f"{num_queued} queued of {len(scheduler.requests)} requests"

    def stats(self) -> EngineStats:
        scheduler, ledger = self.scheduler, self._ledger
        admitted = (*scheduler.loading, *scheduler.running)
        return EngineStats(
            step=self._step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_loading=len(scheduler.loading) + sum(len(one.forks) for one in admitted),
            num_free_blocks=scheduler.tables.pool.num_free,
            num_total_blocks=scheduler.tables.pool.num_blocks,
            num_queued_tokens=scheduler.num_queued_tokens,
            step_time_s=self._times.step_time_s,
            decode_step_s=self._times.decode_step_s,
            prefill_tokens_per_s=self._times.prefill_tokens_per_s,
            prefill_speed=self._times.prefill_speed,
            num_preemptions=scheduler.num_preemptions,
            num_swaps=scheduler.preemptions[Way.SWAP],
            num_refetches=scheduler.preemptions[Way.FETCH],
            num_host_blocks=scheduler.tables.swap.num_used,
            num_prefix_queries_tokens=scheduler.num_prefix_queries_tokens,
            num_prefix_hits_tokens=scheduler.num_prefix_hits_tokens,
            num_prompt_tokens_computed=ledger.num_prompt_tokens_computed,
            num_generation_tokens=ledger.num_generation_tokens,
            num_recomputed_tokens=ledger.num_recomputed_tokens,
            num_drafts=ledger.num_drafts,
            num_draft_tokens=ledger.num_draft_tokens,
            num_accepted_tokens=ledger.num_accepted_tokens,
        )

    def _schedule(self, now_s: float) -> StepPlan:
        plan, admitted = self.scheduler.schedule(now_s)
        passed_over = self.scheduler.take_passed_over()
        self._ledger.note_newcomers(admitted, passed_over)
        self._queue_s = tuple(one.queue_s for one in admitted if not one.is_again)
        if (admitted or passed_over) and self.on_newcomers is not None:
            self.on_newcomers(self._ledger.take_result(self._step))
        return plan

    def _observe(self, plan: StepPlan, step_time_s: float) -> None:
        prefilled = [
            chunk
            for chunk in plan.chunks
            if chunk.num_tokens - chunk.num_drafts > 1 or chunk.start < len(chunk.request.prompt_token_ids)
        ]
        num_prefill_tokens = sum(chunk.num_tokens for chunk in prefilled)
        metrics = StepMetrics(
            step=self._step,
            step_time_s=step_time_s,
            num_seqs=len(plan.chunks),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=plan.num_tokens - num_prefill_tokens,
            queue_s=self._queue_s,
            sum_of_prefill_positions=sum((one.start + one.end - 1) * one.num_tokens // 2 for one in prefilled),
        )
        if plan.chunks:
            self._times.note(metrics)
            if self.scheduler.step_budget is not None:
                self.scheduler.step_budget.note(metrics)
        if self.on_step is not None:
            self.on_step(metrics)
