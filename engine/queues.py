"""The requests that are here, each in the queue of its phase; and what moves them from one to another between steps."""

from bisect import insort
from collections.abc import Callable, Sequence

from kvasir.common.errors import InvalidRequest
from kvasir.engine.block_tables import BlockTables
from kvasir.engine.blocks import BlockId
from kvasir.engine.limits import Limits
from kvasir.engine.request import Matcher, Phase, Request, RequestId


class Queues:
    """What happens to requests from outside: they come, load, go on, are called off. Who is computed is not decided
    here."""

    def __init__(self, limits: Limits, kv_identity: bytes = b"") -> None:
        self.limits = limits
        self.tables = BlockTables(limits, kv_identity)
        self.requests: dict[RequestId, Request] = {}
        self.waiting: list[Request] = []  # in order
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self._newcomers: list[Request] = []  # that no step has considered yet
        self._num_submitted = 0
        self._queue_may_move = False  # something has changed since the queue's head was last found not to fit

    @property
    def max_total_tokens(self) -> int:
        """The longest that a request can grow: its last token is sampled, and never computed."""
        return min(self.limits.max_model_len, self.limits.num_blocks * self.limits.block_size + 1)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or (bool(self.waiting) and self._queue_may_move)

    @property
    def num_queued_tokens(self) -> int:
        """Accepted, to be computed here, and not computed yet; decoding is not queueing."""
        waiting = sum(request.num_tokens for request in self.waiting if "blocks" not in request.awaits)
        begun = sum(request.num_uncomputed_tokens for request in self.running if request.num_uncomputed_tokens > 1)
        compiling = sum(one.num_uncomputed_tokens for one in self.loading if one.awaits == {"grammar"})
        return waiting + begun + compiling

    def check_fits(self, request: Request) -> None:
        """Refuse what an empty cache could not serve. Reads nothing that ever changes, so any thread may ask."""
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.num_tokens >= self.max_total_tokens:
            raise InvalidRequest(
                f"{request.num_tokens} tokens and one more do not fit: this node holds {self.max_total_tokens} at most",
                "prompt",
                "context_length_exceeded",
            )
        if request.output_token_ids and len(request.output_token_ids) >= request.sampling.max_tokens:
            raise InvalidRequest("max_tokens have been generated already", "max_tokens")

    def submit(self, request: Request) -> None:
        """With its forks."""
        for one in (request, *request.forks):
            self.check_fits(one)
            if one.request_id in self.requests:
                raise InvalidRequest(f"request {one.request_id} is here already", "request_id")
        for one in (request, *request.forks):
            self._num_submitted += 1
            one.order = (self._turn(one), self._num_submitted)
            one.num_output_at_arrival = len(one.output_token_ids)
            self.requests[one.request_id] = one
        for fork in request.forks:
            fork.leader, fork.phase = request, Phase.FOLLOWING
        if request.sampling.grammar is not None and request.matcher is None:
            request.awaits.add("grammar")
        self._newcomers.append(request)
        self._queue(request)

    def cancel(self, request_id: RequestId) -> None:
        """Free its blocks at once; while a transfer may still write into them, as soon as that has stopped."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request.forks or (request.phase is Phase.LOADING and "blocks" in request.awaits):
            request.cancelled = True
        else:
            self.finish(request)

    def block_loaded(self, request_id: RequestId, index: int, is_exact: bool = True) -> None:
        """It has landed. Not exact (lossy codec, other dtype): it, and what is computed on top, stay the request's."""
        request = self.requests.get(request_id)
        if request is None or request.phase is not Phase.LOADING:
            return
        if request.num_computed_tokens <= index * self.limits.block_size < request.num_awaited_tokens:
            request.loaded_blocks.add(index)
            if not is_exact:
                request.inexact_from = request.num_exact(index)

    def loading_done(self, request_id: RequestId) -> None:
        """No transfer touches the request's blocks any more. Those that have not landed are computed here."""
        request = self.requests.get(request_id)
        if request is None:
            return
        request.awaits.discard("blocks")
        if request.cancelled and not request.forks:
            self.finish(request)
        elif request.phase is Phase.LOADING:
            self._run_if_complete(request)

    def continue_with(self, request_id: RequestId, token_ids: list[int]) -> Request | None:
        """The sender's first tokens; empty: sample the first one here. The request, if it goes on."""
        request = self.requests.get(request_id)
        if request is None or "continue" not in request.awaits or (request.cancelled and not request.forks):
            return None
        request.output_token_ids.extend(token_ids)
        request.awaits.discard("continue")
        if request.phase is Phase.LOADING:
            self._run_if_complete(request)
        return request

    def grammar_ready(self, request_id: RequestId, new_matcher: Callable[[], Matcher]) -> None:
        """Its grammar is compiled; each of its forks follows it by a matcher of its own."""
        request = self.requests.get(request_id)
        if request is None or "grammar" not in request.awaits:
            return
        for one in (request, *request.forks):
            one.matcher = new_matcher()
        request.awaits.discard("grammar")
        if request.phase is Phase.LOADING:
            self._run_if_complete(request)

    def fork(self, request: Request) -> None:
        """Where its prompt is computed by now, let those go on by themselves that have waited for it."""
        if request.phase is not Phase.RUNNING or request.num_computed_tokens < len(request.prompt_token_ids):
            return
        forks, request.forks = request.forks, []
        for fork in forks:
            fork.leader = None
            self._run_fork(request, fork)
        if request.cancelled:
            self.finish(request)

    def _run_fork(self, leader: Request, fork: Request) -> None:
        if self._has_seat and self.tables.fork(leader, fork):
            fork.phase = Phase.LOADING if fork.awaits else Phase.RUNNING
            (self.loading if fork.awaits else self.running).append(fork)
        else:  # as if it had been preempted: its prompt is looked up, or computed again, when there is room
            fork.phase = Phase.WAITING
            fork.num_preemptions += 1
            self._queue(fork)

    def release_blocks(self, block_ids: Sequence[BlockId]) -> None:
        self.tables.release_reported(block_ids)
        self._queue_may_move = True

    def finish(self, request: Request) -> None:
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        self.tables.release(request)
        request.phase = Phase.FINISHED
        del self.requests[request.request_id]
        self._queue_may_move = True
        if request.leader is not None:
            leader, request.leader = request.leader, None
            leader.forks.remove(request)
            if leader.cancelled:
                self.cancel(leader.request_id)

    def _run_if_complete(self, request: Request) -> None:
        if not request.awaits:
            self.loading.remove(request)
            self.running.append(request)
            request.phase = Phase.RUNNING
            self.tables.advance(request, request.num_computed_tokens)
            self.fork(request)

    @property
    def _has_seat(self) -> bool:
        return len(self.running) + len(self.loading) < self.limits.max_num_seqs

    def _turn(self, request: Request) -> float:
        """Smaller is earlier. With aging, a request gains one level of priority in each so many seconds: as all of them
        do, whoever is ahead stays ahead, and nobody is passed for ever by those who come later."""
        if self.limits.scheduling_policy == "fcfs":
            return 0.0
        aging_s = self.limits.priority_aging_s
        return request.arrival_s + request.priority * aging_s if aging_s else float(request.priority)

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda request: request.order)
        self._queue_may_move = True
