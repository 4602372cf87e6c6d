"""Which store is meant."""

from kvasir.router.openai.responses.redis_store import RedisResponseStore
from kvasir.router.openai.responses.store import MemoryResponseStore, ResponseStore


def response_store(url: str | None, *, ttl_s: float, max_bytes: int) -> ResponseStore:
    """Raises ValueError for a URL that is none."""
    return (
        MemoryResponseStore(ttl_s=ttl_s, max_bytes=max_bytes) if url is None else RedisResponseStore(url, ttl_s=ttl_s)
    )
