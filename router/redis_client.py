"""How a router asks a Redis (or Valkey): it is waited for by own time, so that it is not blamed for our stalls."""

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def redis_client(url: str) -> "redis.asyncio.Redis":
    """It waits for as long as it is let, so it is to be asked within an `own_timeout`. What was sent on a connection
    that broke is sent once more. ValueError for a URL that is none."""
    retry = Retry(NoBackoff(), 1)
    return redis.asyncio.from_url(url, socket_timeout=None, socket_connect_timeout=None, retry=retry)
