"""The life of a request: in at the door, through the queue to a pair of nodes, and out token by token.

`Dispatcher.generate` is the whole story; `course.py` tells how a request goes, `attempt.py` one try of it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from kvasir.common.errors import InvalidRequest, NodeUnavailable
from kvasir.router.attempt import Attempt
from kvasir.router.course import Course, Hear, outcome_of
from kvasir.router.delivery import Delivery
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.life import Life, Mark, describe
from kvasir.router.nodes import Role
from kvasir.router.pool import NodePool
from kvasir.router.queue import AdmissionQueue
from kvasir.router.types import ClusterLimits, Reader, RoutedRequest, TokenDelta

log = logging.getLogger(__name__)


class Dispatcher:
    def __init__(
        self,
        pool: NodePool,
        queue: AdmissionQueue,
        metrics: DispatchMetrics,
        *,
        request_timeout_s: float,
        max_attempts: int,
        node_wait_s: float,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._node_wait_s = node_wait_s
        self._lives: set[Life] = set()
        self._last_limits: ClusterLimits | None = None
        self._empty_since_s: float | None = None  # no decode node is here any more
        pool.when_members_change(self._note_members)
        self.canary_passed = False
        self.canary_is_current = False  # it went through the nodes that are here now

    @property
    def is_ready(self) -> bool:
        return self.canary_passed and any(not node.is_draining for node in self._pool.nodes(Role.DECODE))

    def has_joined(self, num_prefill: int, num_decode: int) -> bool:
        counts = [len(self._pool.nodes(role)) for role in (Role.PREFILL, Role.DECODE)]
        return self.canary_is_current and counts[0] >= num_prefill and counts[1] >= num_decode

    @property
    def num_in_flight(self) -> int:
        return len(self._lives)

    def limits(self) -> ClusterLimits:
        """Of the nodes that are here now, or were a moment ago: one that restarts should not turn clients away."""
        since_s = self._empty_since_s
        is_empty = since_s is not None and asyncio.get_running_loop().time() - since_s > self._node_wait_s
        if self._last_limits is None or is_empty:
            raise NodeUnavailable("no decode node is here")
        return self._last_limits

    def _note_members(self) -> None:
        nodes = [node.info for node in self._pool.nodes(Role.DECODE)]
        if not nodes:
            self._empty_since_s = self._empty_since_s or asyncio.get_running_loop().time()
            return
        self._empty_since_s = None
        self._last_limits = ClusterLimits(
            model_name=nodes[0].model_name,
            max_model_len=max(node.max_model_len for node in nodes),
            vocab_size=min(node.vocab_size for node in nodes),
            eos_token_ids=frozenset().union(*(node.eos_token_ids for node in nodes)),
            max_prompt_tokens=max(node.max_tokens_held for node in nodes) - 1,
        )

    async def generate(self, request: RoutedRequest, reader: Reader | None = None) -> AsyncGenerator[TokenDelta]:
        """See `types.Backend`. What nodes say is acted on at once, however slowly the client reads."""
        generation = _Generation(self, reader or Reader())
        entered = self._enter(request)
        for life in entered.parts() if entered.has_begun and request.num_sequences > 1 else [entered]:
            generation.begin(life)
        try:
            async with aclosing(generation.delivery.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            generation.close()

    def _enter(self, request: RoutedRequest) -> Life:
        """Everything that can be refused is refused here."""
        limits = self.limits()
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if num_prompt_tokens > limits.max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens, at most {limits.max_prompt_tokens} fit",
                param="prompt",
                code="context_length_exceeded",
            )
        room = limits.max_prompt_tokens + 1 - num_prompt_tokens
        if request.sampling.max_tokens > room:
            request = replace(request, sampling=replace(request.sampling, max_tokens=room))
        turn = self._queue.take_turn(request.priority, num_prompt_tokens)
        longest_s = self._request_timeout_s
        timeout_s = longest_s if request.deadline_s is None else min(longest_s, request.deadline_s)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        life = Life(request, turn, deadline_s, self._max_attempts)
        if request.continued is not None:
            life.go_on_from(request.continued)
        return life

    def begin(
        self,
        life: Life,
        deliver: Callable[[TokenDelta], None],
        over: Callable[[Course, Exception | None, list[Life]], None],
    ) -> Course:
        self._lives.add(life)
        return Course(life, self._attempt, self._metrics, deliver, over)

    def leave(self, life: Life, outcome: str) -> None:
        self._lives.discard(life)
        life.mark(Mark.FINISHED)
        self._metrics.finished(life, outcome)
        log.debug("%s: %s %s", life.request.request_id, outcome, describe(life.marks))

    def _attempt(self, life: Life, hear: Hear) -> Attempt:
        return Attempt(life, self._queue, self._pool, self._metrics, hear)


class _Generation:
    """The courses of one request, whose tokens go to one reader."""

    def __init__(self, dispatcher: Dispatcher, reader: Reader) -> None:
        self.delivery = Delivery(reader)
        self._dispatcher = dispatcher
        self._reader = reader
        self._courses: set[Course] = set()

    def begin(self, life: Life) -> None:
        course = self._dispatcher.begin(life, self.delivery.put, self._over)
        self._courses.add(course)
        self._reader.listen(course.stop)

    def close(self) -> None:
        """Nothing of it goes on."""
        for course in list(self._courses):
            course.close()
            self._leave(course, "abort")

    def _over(self, course: Course, error: Exception | None, parts: list[Life]) -> None:
        self._leave(course, outcome_of(error))
        for part in parts:
            self.begin(part)
        if error is not None or not self._courses:
            self.delivery.end(error)

    def _leave(self, course: Course, outcome: str) -> None:
        self._courses.remove(course)
        self._reader.ignore(course.stop)
        self._dispatcher.leave(course.life, outcome)
