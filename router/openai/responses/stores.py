"""Which store is meant."""

from collections.abc import Callable

from kvasir.router.openai.responses.redis_store import RedisResponseStore
from kvasir.router.openai.responses.store import ResponseStore


def response_store(url: str | None, ttl_s: float, in_memory: Callable[[], ResponseStore]) -> ResponseStore:
    """Raises ValueError for a URL that is none."""
    return in_memory() if url is None else RedisResponseStore(url, ttl_s=ttl_s)
