"""What a router says of itself as a whole, whether it is one process or several."""

from collections.abc import Callable
from typing import Any, Protocol

from kvasir.common.errors import ServingError
from kvasir.common.metrics import Metrics
from kvasir.router.metrics import RouterMetrics
from kvasir.router.types import ClusterLimits

Picture = dict[str, Any]  # of one process: see `page.picture`


class Readiness(Protocol):
    """What it takes of the dispatching half to say whether it is ready; `kvasir.router.dispatch.Dispatcher` is one."""

    @property
    def is_ready(self) -> bool:
        """A decode node is alive, and the last canary went through all tiers."""
        ...

    def has_joined(self, num_prefill: int, num_decode: int) -> bool:
        """At least so many nodes are here, and the last canary was sent after the last of them came."""
        ...

    def limits(self) -> ClusterLimits:
        """Raises NodeUnavailable while no decode node is here."""
        ...


class Overview(Protocol):
    """Raises nothing: what cannot be had is left out."""

    async def why_not_ready(self, num_prefill: int, num_decode: int) -> str:
        """Empty if it is, and so many nodes have joined."""
        ...

    async def load(self) -> int:
        """Generation requests that have not ended."""
        ...

    async def metrics(self) -> bytes:
        """Prometheus text."""
        ...

    async def pictures(self, answer: str) -> list[Picture]:
        """One a process. `answer`: the id of one whose nodes are wanted, or nothing."""
        ...


class OwnOverview:
    """Of this process."""

    def __init__(
        self,
        readiness: Readiness,
        metrics: Metrics,
        router_metrics: RouterMetrics,
        take_picture: Callable[[str], Picture] = lambda answer: {},
    ) -> None:
        self._readiness = readiness
        self._metrics = metrics
        self._router_metrics = router_metrics
        self._take_picture = take_picture

    async def why_not_ready(self, num_prefill: int, num_decode: int) -> str:
        if not self._readiness.is_ready:
            try:
                self._readiness.limits()
            except ServingError as error:
                return str(error)
            return "the last canary did not go through all tiers, or none has yet"
        if (num_prefill or num_decode) and not self._readiness.has_joined(num_prefill, num_decode):
            return "not all nodes have joined, or no canary has gone through them yet"
        return ""

    async def load(self) -> int:
        return self._router_metrics.num_in_flight

    async def metrics(self) -> bytes:
        return self._metrics.render()[0]

    async def pictures(self, answer: str) -> list[Picture]:
        return [self._take_picture(answer)]
