"""The dispatching half as one tenant sees it: within its limits and, if wanted, beside all others' prefix caches."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from kvasir.router.tenants.limiter import Limiter
from kvasir.router.tenants.tenant import NO_LIMITS, current_tenant
from kvasir.router.types import Backend, ClusterLimits, Reader, RoutedRequest, TokenDelta


class TenantBackend:
    """A `Backend` over another. Each prompt of a client's request counts as a request."""

    def __init__(self, backend: Backend, limiter: Limiter, *, isolates: bool) -> None:
        self._backend = backend
        self._limiter = limiter
        self._isolates = isolates

    def limits(self) -> ClusterLimits:
        return self._backend.limits()

    def generate(self, request: RoutedRequest, reader: Reader | None = None) -> AsyncGenerator[TokenDelta, None]:
        tenant, reader = current_tenant.get(), reader or Reader()
        if self._isolates:
            request = replace(request, cache_salt=tenant.salted(request.cache_salt))
        deltas = self._backend.generate(request, reader)
        if tenant.limits == NO_LIMITS:
            return deltas
        return self._limiter.limited(tenant, len(request.prompt_token_ids), deltas, reader)
