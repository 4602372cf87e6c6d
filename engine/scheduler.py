"""Who computes how many tokens in the next step."""

from collections import Counter
from collections.abc import Callable
from math import ceil

from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.limits import Limits
from kvasir.engine.open_plan import OpenPlan
from kvasir.engine.preemption import Choice, Loss, Rates, Way, choose_victim, choose_way
from kvasir.engine.queues import Queues
from kvasir.engine.request import Phase, Request
from kvasir.engine.speeds import StepTimes
from kvasir.engine.step import Admitted, Chunk, StepPlan
from kvasir.engine.step_budget import StepBudget

_LARGEST_SHARE = 0.75  # of what is left of a step, for one prompt while others are behind it


class Scheduler(Queues):
    """There is no prefill mode and no decode mode: each request catches up with its own number of tokens.

    1. Requests with one token to compute (decode) come first, one token each, so that prompts never stall them.
    2. Then prompts that have begun, in chunks, then waiting ones; in the order of the queue, nobody overtakes. How many
       tokens that may be is bounded by the time that those who decode have for their next token.
    3. A newcomer is admitted if there is a seat, and room for all of its tokens above the watermark; it gets all of
       that room at once. A prompt, with a seat or without, begins if not too many have begun already. A long one may be
       passed by those that are not.
    4. Out of blocks, since those who decode grow, one of the lowest priority gives way: the last come, or who gives his
       blocks for much less.
    So no request that holds blocks ever waits behind one that holds none, but for long prompts that are to be passed;
    and a prefill node preempts nobody.
    """

    def __init__(self, limits: Limits, kv_identity: bytes = b"") -> None:
        super().__init__(limits, kv_identity)
        self.times = StepTimes()
        self.choose_way: Callable[[Loss, Rates, int], Choice] = choose_way
        self.fetch_s_per_block: float | None = None  # from a store, as last measured; set by whoever fetches
        self.preemptions: Counter[Way] = Counter()
        self.num_prefix_queries_tokens = 0
        self.num_prefix_hits_tokens = 0
        self.step_budget: StepBudget | None = None
        if limits.target_itl_s:
            min_tokens = min(limits.block_size, limits.max_num_batched_tokens)
            self.step_budget = StepBudget(limits.target_itl_s, min_tokens)

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()

    def schedule(self, now_s: float) -> tuple[StepPlan, list[Admitted]]:
        plan = OpenPlan(self.limits.max_num_batched_tokens)
        in_order = sorted(self.running, key=lambda request: request.order)
        prompts = [request for request in in_order if request.num_uncomputed_tokens > 1]
        for request in in_order:
            if request.num_uncomputed_tokens <= 1 and request.phase is Phase.RUNNING:
                self._schedule_running(request, plan)
        plan.num_prompts = len(prompts) + len(self.waiting)
        if self.step_budget is not None:
            plan.budget = self.step_budget.num_prefill_tokens(len(plan.chunks), plan.budget)
        for request in prompts:
            if request.phase is Phase.RUNNING:  # it may have given way to one before it
                self._schedule_running(request, plan)
        self._queue_may_move = False
        for request in tuple(self.waiting):
            if not request.awaits and self._lets_others_pass(request, plan):
                continue
            if not self._admit(request, plan, now_s):
                break
        self._hand_out_the_rest(plan)
        return StepPlan(tuple(plan.chunks.values())), plan.admitted

    def take_passed_over(self) -> list[Request]:
        """Those that came before the last `schedule`, and found no room in it."""
        newcomers, self._newcomers = self._newcomers, []
        return [request for request in newcomers if request.phase is Phase.WAITING]

    def _schedule_running(self, request: Request, plan: OpenPlan) -> None:
        if request.num_uncomputed_tokens > 1:
            plan.num_prompts -= 1
            if self._lets_others_pass(request, plan) or self._too_many_have_begun(request, plan):
                plan.held_back.add(request.request_id)
                return
        num_tokens = self._chunk_size(request, plan)
        if num_tokens == 0:
            return
        while not self.tables.reserve(request, request.num_computed_tokens + num_tokens):
            if self._take_back_from_drafts():
                continue
            victim, way = self._choose_victim(request)
            plan.drop(victim)
            self._preempt(victim, way)
            if victim is request:
                return
        plan.add(Chunk(request, request.num_computed_tokens, num_tokens))

    # --- the queue -------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, plan: OpenPlan, now_s: float) -> bool:
        """Give it its seat, its cached blocks, and what it needs for its next phase."""
        if not self._has_seat:
            return False
        if not request.awaits and (plan.budget == 0 or self._too_many_have_begun(request, plan)):
            return False
        while not self.tables.begin(request, self._num_spare_blocks(request)):
            if not self._take_back_from_drafts():
                return False
        self.waiting.remove(request)
        self.tables.reserve(request, request.num_tokens)
        if request.saved is not None:
            self.tables.restore(request)
        if request.num_preemptions == 0:
            self._note_first_admission(request, plan, now_s)
        elif "blocks" in request.awaits:
            self._fetch_again(request, plan)
        request.phase = Phase.LOADING if request.awaits else Phase.RUNNING
        (self.loading if request.awaits else self.running).append(request)
        if request.phase is Phase.RUNNING:
            self._schedule_running(request, plan)
        return True

    def _note_first_admission(self, request: Request, plan: OpenPlan, now_s: float) -> None:
        missing: tuple[int, ...] = ()
        num_cached_blocks = request.num_computed_tokens // self.limits.block_size
        if "blocks" in request.awaits:
            request.num_awaited_tokens = request.landed_end = request.num_tokens_at_arrival
            end = num_blocks_for(request.num_awaited_tokens, self.limits.block_size)
            missing = tuple(range(num_cached_blocks, end))
        request.num_cached_tokens = request.num_computed_tokens
        self.num_prefix_queries_tokens += request.num_tokens
        self.num_prefix_hits_tokens += request.num_cached_tokens
        queue_s = now_s - request.arrival_s
        plan.admitted.append(Admitted(request, tuple(request.block_table), missing, request.num_cached_tokens, queue_s))

    def _fetch_again(self, request: Request, plan: OpenPlan) -> None:
        """What the store has of it, and the prefix cache has not."""
        block_size = self.limits.block_size
        request.num_awaited_tokens = request.landed_end = request.num_stored_tokens
        missing = tuple(range(request.num_computed_tokens // block_size, request.num_stored_tokens // block_size))
        if missing:
            cached = request.num_computed_tokens
            plan.admitted.append(Admitted(request, tuple(request.block_table), missing, cached, 0.0, is_again=True))
        else:
            request.awaits.discard("blocks")

    def _lets_others_pass(self, request: Request, plan: OpenPlan) -> bool:
        """A long prompt, while as many of its kind as may have begun and are not done."""
        most = self.limits.max_long_partial_prefills
        if not most or not self._is_long(request):
            return False
        return sum(self._is_long(one) for one in self._have_begun(request, plan)) >= most

    def _too_many_have_begun(self, request: Request, plan: OpenPlan) -> bool:
        most = self.limits.max_num_partial_prefills
        return most > 0 and len(self._have_begun(request, plan)) >= most

    def _have_begun(self, request: Request, plan: OpenPlan) -> list[Request]:
        """Prompts that go before this one, and on after this step: of those with a seat all that are not held back;
        where it has one too (what it awaited has come, but not all of its blocks), those before it in the queue."""
        prompts = (one for one in self.running if one.num_uncomputed_tokens > 1)
        begun = [one for one in prompts if one.request_id not in plan.held_back and not plan.completes(one)]
        return begun if request.phase is Phase.WAITING else [one for one in begun if one.order < request.order]

    def _is_long(self, request: Request) -> bool:
        return request.num_tokens > (self.limits.long_prefill_token_threshold or request.num_tokens)

    def _chunk_size(self, request: Request, plan: OpenPlan) -> int:
        """As many tokens as are left, but within the limits, and with something left for those behind it."""
        budget = plan.budget
        if self.limits.long_prefill_token_threshold:
            budget = min(budget, self.limits.long_prefill_token_threshold)
        elif plan.num_prompts > 0:
            budget = ceil(_LARGEST_SHARE * budget)
        return min(self._most_at_once(request), budget)

    def _hand_out_the_rest(self, plan: OpenPlan) -> None:
        """Those behind did not take all that was left for them."""
        for chunk in tuple(plan.chunks.values()):
            request = chunk.request
            num_tokens = min(self._most_at_once(request), chunk.num_tokens + plan.budget)
            if self.limits.long_prefill_token_threshold or num_tokens <= chunk.num_tokens:
                continue
            if self.tables.reserve(request, chunk.start + num_tokens):
                plan.drop(request)
                plan.add(Chunk(request, chunk.start, num_tokens))

    def _most_at_once(self, request: Request) -> int:
        """Never over a landed block."""
        num_tokens = request.num_uncomputed_tokens
        if request.loaded_blocks:
            next_landed = min(request.loaded_blocks) * self.limits.block_size
            num_tokens = min(num_tokens, next_landed - request.num_computed_tokens)
        return num_tokens

    def _num_spare_blocks(self, request: Request) -> int:
        """The watermark, for newcomers only. With nobody else to run, waiting would gain nothing."""
        if request.num_preemptions or not (self.running or self.loading):
            return 0
        return int(self.limits.watermark * self.limits.num_blocks)

    # --- out of blocks ---------------------------------------------------------------------------------------------

    def _take_back_from_drafts(self) -> bool:
        """From one after the other: nobody waits or gives way for a draft. False: they have nothing more."""
        return any(self.tables.trim(one) for one in self.running)

    def _choose_victim(self, request: Request) -> tuple[Request, Way]:
        """Of the lowest priority that is running; never one that is served before `request`."""
        in_order = sorted(self.running, key=lambda one: one.order)
        lowest = in_order[-1].priority if self.limits.scheduling_policy == "priority" else None
        candidates = [one for one in in_order if one.order >= request.order and lowest in (None, one.priority)]
        losses = [self.tables.loss_of(one) for one in candidates]
        self.tables.swap.measure()
        choices = [self._choose_way(loss) for loss in losses]
        chosen = choose_victim([one.cost_s for one in choices], [loss.num_freed_blocks for loss in losses])
        return candidates[chosen], choices[chosen].way

    def _choose_way(self, loss: Loss) -> Choice:
        swap = self.tables.swap
        rates = Rates(
            prefill=self.times.prefill_speed,
            copy_s_per_block=swap.copy_s_per_block,
            fetch_s_per_block=self.fetch_s_per_block,
        )
        return self.choose_way(loss, rates, swap.num_free)

    def _preempt(self, victim: Request, way: Way) -> None:
        """Back to owning no blocks. What it still awaited has come: only RUNNING requests are preempted."""
        self.running.remove(victim)
        saved = self.tables.save(victim) if way is Way.SWAP else None
        if saved is None:
            self.tables.swap.decline()
        self.tables.release(victim)
        victim.saved = saved
        victim.phase = Phase.WAITING
        victim.num_awaited_tokens = 0
        victim.num_preemptions += 1
        if way is Way.FETCH:
            victim.awaits.add("blocks")
        self.preemptions[way] += 1
        self._queue(victim)
