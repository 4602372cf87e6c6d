"""How a router asks a Redis (or Valkey): it is waited for by own time, so that it is not blamed for our stalls."""

from contextlib import suppress

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvasir.common.own_time import own_timeout

_CLOSE_WITHIN_S = 2.0


def redis_client(url: str) -> "redis.asyncio.Redis":
    """It waits for as long as it is let, so it is to be asked within an `own_timeout`. What was sent on a connection
    that broke is sent once more. ValueError for a URL that is none."""
    retry = Retry(NoBackoff(), 1)
    return redis.asyncio.from_url(url, socket_timeout=None, socket_connect_timeout=None, retry=retry)


async def close_client(client: "redis.asyncio.Redis") -> None:
    """In time, though the server may never take what has been sent to it."""
    with suppress(RedisError, OSError):
        async with own_timeout(_CLOSE_WITHIN_S):
            await client.aclose()
