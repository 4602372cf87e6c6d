"""Budgets in Redis or Valkey, for several routers: each step is one script there, by the server's own clock.

A server that does not answer limits nobody: what it would have counted is let through, and the failure is counted.
"""

import logging
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from kvasir.common.logging import Sparse
from kvasir.common.own_time import own_timeout
from kvasir.router.redis_client import close_client, redis_client
from kvasir.router.tenants.budgets import Balance, Budget, balance

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_NO_MATTER_WHAT = -1e18

# The level before, after filling; taken unless it is below what is wanted. A bucket that is full again is forgotten.
_TAKE = """
local now = redis.call('TIME'); now = now[1] + now[2] / 1e6
local capacity, per_s, amount, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local known = redis.call('HMGET', KEYS[1], 'level', 'at')
local level = capacity
if known[1] then level = math.min(capacity, known[1] + per_s * math.max(0, now - known[2])) end
if level >= wanted then
  redis.call('HSET', KEYS[1], 'level', string.format('%.17g', level - amount), 'at', string.format('%.17g', now))
  redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * (capacity - level + amount) / per_s) + 1000)
end
return string.format('%.17g', level)
"""
# It may be sent twice: a connection breaks after the server has acted, too.
_ENTER = """
local now = redis.call('TIME'); now = now[1] + now[2] / 1e6
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 1 end
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * ARGV[3]) + 1000)
return 1
"""


class RedisBudgets:
    def __init__(self, url: str, prefix: str = "kvasir", on_failure: Callable[[], None] = lambda: None) -> None:
        self._client = redis_client(url)
        self._prefix = prefix
        self._on_failure = on_failure
        self._sparse = Sparse()
        self._take = self._client.register_script(_TAKE)
        self._enter = self._client.register_script(_ENTER)

    async def take(self, name: str, budget: Budget, amount: float) -> Balance:
        wanted = min(1.0, budget.capacity)
        level = await self._ask(self._take, f"budget:{name}", budget.capacity, budget.per_s, amount, wanted)
        return Balance(True, budget.capacity, 0.0) if level is None else balance(float(level), budget, amount)

    async def charge(self, name: str, budget: Budget, amount: float) -> None:
        await self._ask(self._take, f"budget:{name}", budget.capacity, budget.per_s, amount, _NO_MATTER_WHAT)

    async def enter(self, name: str, member: str, num_places: int, ttl_s: float) -> bool:
        return bool(await self._ask(self._enter, f"room:{name}", member, num_places, ttl_s) != 0)

    async def leave(self, name: str, member: str) -> None:
        try:
            async with own_timeout(_TIMEOUT_S):
                await self._client.zrem(f"{self._prefix}:room:{name}", member)
        except (RedisError, OSError) as error:
            self._failed(error)

    async def close(self) -> None:
        await close_client(self._client)

    async def _ask(self, script: Any, name: str, *arguments: float | str) -> Any:
        """None if the server does not answer."""
        try:
            async with own_timeout(_TIMEOUT_S):
                return await script(keys=[f"{self._prefix}:{name}"], args=arguments)
        except (RedisError, OSError) as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        self._on_failure()
        if self._sparse.allows("failed"):
            log.warning("limits are not kept while their Redis fails: %s", type(error).__name__)
