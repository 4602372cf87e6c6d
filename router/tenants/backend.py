"""The dispatching half as one tenant sees it: within its limits and, if wanted, beside all others' prefix caches."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from kvasir.router.tenants.limiter import Limiter
from kvasir.router.tenants.tenant import NO_LIMITS, current_tenant
from kvasir.router.types import Backend, ClusterLimits, Reader, RoutedRequest, TokenDelta


class TenantBackend:
    """A `Backend` over another."""

    def __init__(self, backend: Backend, limiter: Limiter, *, isolates: bool) -> None:
        self._backend = backend
        self._limiter = limiter
        self._isolates = isolates

    def limits(self) -> ClusterLimits:
        return self._backend.limits()

    def generate(self, request: RoutedRequest, reader: Reader | None = None) -> AsyncGenerator[TokenDelta, None]:
        if self._isolates:
            request = replace(request, cache_salt=current_tenant.get().salted(request.cache_salt))
        return self._backend.generate(request, reader)

    def limited(
        self, requests: Sequence[RoutedRequest], readers: Sequence[Reader], deltas: AsyncGenerator[TokenDelta, None]
    ) -> AsyncGenerator[TokenDelta, None]:
        """Those of all prompts of a client's request, which counts as one."""
        tenant = current_tenant.get()
        if tenant.limits == NO_LIMITS:
            return deltas
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return self._limiter.limited(tenant, num_prompt_tokens, deltas, readers)
