"""Keeps a tenant within its limits: at the door, before anything is asked of a node."""

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from kvasir.router.openai.errors import HttpError
from kvasir.router.tenants.budgets import Balance, Budget, Budgets
from kvasir.router.tenants.tenant import Tenant, current_standing
from kvasir.router.types import Reader, TokenDelta

log = logging.getLogger(__name__)


class RateLimited(HttpError):
    """429, as OpenAI's clients know it: they wait as long as Retry-After says, and try again."""

    def __init__(self, tenant: Tenant, what: str, limit: int, wait_s: float) -> None:
        headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
        per = "at once" if what == "concurrent requests" else "a minute"
        kind = what.split()[-1]
        message = f"{tenant.name} may have {limit} {kind} {per}; try again in {wait_s:.1f} s"
        super().__init__(429, message, "rate_limit_exceeded", headers, kind)


class Limiter:
    def __init__(
        self, budgets: Budgets, max_request_s: float, on_refusal: Callable[[str, str], None] = lambda tenant, what: None
    ) -> None:
        self._budgets = budgets
        self._max_request_s = max_request_s  # a place that nobody gives back is free after this
        self._on_refusal = on_refusal

    async def close(self) -> None:
        await self._budgets.close()

    async def limited(
        self, tenant: Tenant, num_prompt_tokens: int, deltas: AsyncGenerator[TokenDelta], readers: Sequence[Reader]
    ) -> AsyncGenerator[TokenDelta]:
        """The same deltas; those that `readers` take go past here, and count.

        Raises RateLimited before the first one, and then has asked for none.
        """
        num_tokens = 0
        async with aclosing(deltas), self._place(tenant):
            await self._take(tenant, "requests", tenant.limits.requests_per_minute, 1)
            await self._take(tenant, "tokens", tenant.limits.tokens_per_minute, num_prompt_tokens)
            try:
                async for delta in deltas:
                    num_tokens += len(delta.token_ids)
                    yield delta
            finally:
                num_tokens += sum(reader.num_tokens_taken for reader in readers)
                await asyncio.shield(self._charge(tenant, num_tokens))

    @asynccontextmanager
    async def _place(self, tenant: Tenant) -> AsyncIterator[None]:
        num_places = tenant.limits.max_concurrent_requests
        if not num_places:
            yield
            return
        member = uuid.uuid4().hex
        entering = asyncio.ensure_future(self._budgets.enter(tenant.name, member, num_places, self._max_request_s))
        try:
            if not await asyncio.shield(entering):
                raise self._refused(tenant, "concurrent requests", num_places, 1.0)
            yield
        finally:
            await asyncio.shield(self._leave(tenant, member, entering))

    async def _leave(self, tenant: Tenant, member: str, entering: asyncio.Future[bool]) -> None:
        """Whoever is cancelled while it enters may have been given a place all the same."""
        if await entering:
            await self._budgets.leave(tenant.name, member)

    async def _take(self, tenant: Tenant, what: str, limit: int, amount: int) -> None:
        if limit:
            budget = Budget.per_minute(limit)
            balance: Balance = await self._budgets.take(f"{tenant.name}:{what}", budget, amount)
            current_standing.get({}).update(_standing(what, budget, balance))
            if not balance.is_allowed:
                raise self._refused(tenant, what, limit, balance.wait_s)

    async def _charge(self, tenant: Tenant, num_tokens: int) -> None:
        if limit := tenant.limits.tokens_per_minute:
            await self._budgets.charge(f"{tenant.name}:tokens", Budget.per_minute(limit), num_tokens)

    def _refused(self, tenant: Tenant, what: str, limit: int, wait_s: float) -> RateLimited:
        self._on_refusal(tenant.name, what)
        return RateLimited(tenant, what, limit, wait_s)


def _standing(what: str, budget: Budget, balance: Balance) -> dict[str, str]:
    """OpenAI's headers: the limit, what is left of it, and how long until all of it is there again."""
    minutes, seconds = divmod(math.ceil((budget.capacity - balance.left) / budget.per_s), 60)
    return {
        f"x-ratelimit-limit-{what}": f"{budget.capacity:.0f}",
        f"x-ratelimit-remaining-{what}": f"{max(0, math.floor(balance.left))}",
        f"x-ratelimit-reset-{what}": f"{minutes}m{seconds}s" if minutes else f"{seconds}s",
    }
