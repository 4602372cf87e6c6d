"""A real generation through both tiers, whenever the set of nodes has changed: what readiness rests on."""

import asyncio
import logging
import uuid

from kvasir.common.errors import Overloaded, ServingError
from kvasir.router.dispatch import Dispatcher
from kvasir.router.dispatch_metrics import DispatchMetrics
from kvasir.router.nodes import Role
from kvasir.router.pool import NodePool
from kvasir.router.types import RoutedRequest, Sampling

log = logging.getLogger(__name__)

_NUM_PROMPT_TOKENS = 8
_NUM_TOKENS = 2  # the first from the prefill node, the second from the decode node
_FIRST_IN_LINE = -(1 << 31)
_AGAIN_AFTER_S = 1.0


class Canary:
    def __init__(self, dispatcher: Dispatcher, pool: NodePool, metrics: DispatchMetrics, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._members_changed = asyncio.Event()
        pool.when_members_change(self._outdate)

    def _outdate(self) -> None:
        self._members_changed.set()
        self._dispatcher.canary_is_current = False

    async def run(self) -> None:
        """Again after each change, and after each failure. While the cluster is full, the last result stands."""
        while True:
            await self._members_changed.wait()
            self._members_changed.clear()
            if self._pool.nodes(Role.DECODE) and not await self._succeeds():
                await asyncio.sleep(_AGAIN_AFTER_S)
                self._members_changed.set()
            self._dispatcher.canary_is_current = not self._members_changed.is_set()

    async def _succeeds(self) -> bool:
        try:
            num_tokens = 0
            async for delta in self._dispatcher.generate(self._request()):
                num_tokens += len(delta.token_ids)
            error: Exception | None = None if num_tokens == _NUM_TOKENS else RuntimeError(f"{num_tokens} tokens came")
        except Overloaded:
            self._metrics.canaries(result="full")
            return self._dispatcher.canary_passed
        except ServingError as failure:
            error = failure
        self._dispatcher.canary_passed = error is None
        self._metrics.canaries(result="ok" if error is None else "failed")
        if error is not None:
            log.warning("canary failed: %s", error)
        return error is None

    def _request(self) -> RoutedRequest:
        vocab_size = self._dispatcher.limits().vocab_size
        return RoutedRequest(
            request_id=f"canary-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=tuple(index % vocab_size for index in range(1, _NUM_PROMPT_TOKENS + 1)),
            sampling=Sampling(max_tokens=_NUM_TOKENS),
            priority=_FIRST_IN_LINE,
            deadline_s=self._timeout_s,
            crosses_tiers=True,
        )
