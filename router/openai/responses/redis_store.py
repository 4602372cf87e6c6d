"""Stored responses in Redis (or Valkey), where several routers find them."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from redis.exceptions import RedisError

from kvasir.common.own_time import own_timeout
from kvasir.router.openai.errors import StoreUnavailable
from kvasir.router.openai.responses.store import StoredResponse
from kvasir.router.redis_client import close_client, redis_client

_TIMEOUT_S = 2.0
T = TypeVar("T")


class RedisResponseStore:
    def __init__(self, url: str, *, ttl_s: float) -> None:
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._redis = redis_client(url)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        data = await self._answer(self._redis.get(_key(owner, response_id)))
        if not isinstance(data, bytes):
            return None
        try:
            stored = StoredResponse.from_bytes(data)
        except ValueError:
            return None
        return stored if stored.response_id == response_id else None

    async def put(self, owner: str, stored: StoredResponse) -> None:
        key = _key(owner, stored.response_id)
        await self._answer(self._redis.set(key, stored.to_bytes(), px=self._ttl_ms))

    async def delete(self, owner: str, response_id: str) -> bool:
        return bool(await self._answer(self._redis.delete(_key(owner, response_id))))

    async def close(self) -> None:
        await close_client(self._redis)

    async def _answer(self, command: Awaitable[T]) -> T:
        """Comes to its end also when nobody waits for it any more: a reply left unread would be the next one's."""
        task = asyncio.create_task(_in_time(command))
        try:
            return await asyncio.shield(task)
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"the store of responses does not answer: {error}") from error
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise


async def _in_time(command: Awaitable[T]) -> T:
    async with own_timeout(_TIMEOUT_S):
        return await command


def _key(owner: str, response_id: str) -> str:
    return f"kvasir:response:{owner}:{response_id}"
