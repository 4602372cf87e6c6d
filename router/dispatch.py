"""The life of a request: in at the door, through the queue to a pair of nodes, and out token by token.

`Dispatcher.generate` is the whole story; `attempt.py` tells one try of it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from kvasir.common.errors import InvalidRequest, NodeUnavailable, ServingError
from kvasir.router.attempt import Attempt, TryAgain
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.life import Life, Mark, describe
from kvasir.router.merge import merge
from kvasir.router.nodes import Role
from kvasir.router.pool import NodePool
from kvasir.router.queue import AdmissionQueue
from kvasir.router.types import ClusterLimits, RoutedRequest, Stops, TokenDelta

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
        self._last_limits_s = 0.0
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
        now = asyncio.get_running_loop().time()
        nodes = [node.info for node in self._pool.nodes(Role.DECODE)]
        if nodes:
            self._last_limits = ClusterLimits(
                model_name=nodes[0].model_name,
                max_model_len=max(node.max_model_len for node in nodes),
                vocab_size=min(node.vocab_size for node in nodes),
                eos_token_ids=frozenset().union(*(node.eos_token_ids for node in nodes)),
                max_prompt_tokens=max(node.max_tokens_held for node in nodes) - 1,
            )
            self._last_limits_s = now
        elif self._last_limits is None or now - self._last_limits_s > self._node_wait_s:
            raise NodeUnavailable("no decode node is here")
        return self._last_limits

    def generate(self, request: RoutedRequest, stops: Stops | None = None) -> AsyncGenerator[TokenDelta]:
        """See `types.Backend`.

        It lives in a task of its own: what nodes say is acted on at once, however slowly the client reads.
        """
        return merge([self._live(lambda: self._enter(request), stops or Stops())])

    async def _live(self, enter: Callable[[], Life], stops: Stops) -> AsyncGenerator[TokenDelta]:
        life = enter()
        parts: list[Life] = []
        outcome = "abort"  # unless we get any further
        attempt = self._attempt(life)
        stops.listen(lambda sequence: attempt.stop(sequence))
        try:
            while life.open:
                try:
                    delta = await attempt.next()
                except TryAgain as failure:
                    attempt.close()
                    self._metrics.retries(reason=type(failure.error).__name__)
                    log.info("%s: %s; trying again", life.request.request_id, failure)
                    life.note_failure(failure.error)
                    if life.has_begun and life.request.num_sequences > 1:
                        parts = life.parts()
                    else:
                        attempt = self._attempt(life)
                    continue
                if delta is None:
                    break
                self._metrics.delivered(len(delta.token_ids))
                if not life.open:
                    attempt.close()  # not when the client comes back for more, but now
                yield delta
        except ServingError as error:
            outcome = type(error).__name__
            raise
        finally:
            attempt.close()
            self._leave(life, outcome)
        if parts:
            async with aclosing(merge([self._live(partial(self._rejoin, part), stops) for part in parts])) as deltas:
                async for delta in deltas:
                    yield delta

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
        sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
        turn = self._queue.take_turn(request.priority, num_prompt_tokens)
        longest_s = self._request_timeout_s
        timeout_s = longest_s if request.deadline_s is None else min(longest_s, request.deadline_s)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return self._rejoin(Life(replace(request, sampling=sampling), turn, deadline_s, self._max_attempts))

    def _rejoin(self, life: Life) -> Life:
        self._lives.add(life)
        return life

    def _attempt(self, life: Life) -> Attempt:
        return Attempt(life, self._queue, self._pool, self._metrics)

    def _leave(self, life: Life, outcome: str) -> None:
        self._lives.discard(life)
        life.mark(Mark.FINISHED)
        self._metrics.finished(life, outcome)
        log.debug("%s: %s %s", life.request.request_id, outcome, describe(life.marks))
