"""Stores of responses: what they keep, for whom, how long, and what they do when Redis is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvasir.router import redis_client
from kvasir.router.openai.errors import StoreUnavailable
from kvasir.router.openai.responses import redis_store
from kvasir.router.openai.responses.redis_store import RedisResponseStore
from kvasir.router.openai.responses.store import MemoryResponseStore, ResponseStore, StoredResponse
from tests.valkey import RedisServer


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is: a server that is there has answered in time."""
    monkeypatch.setattr(redis_store, "_TIMEOUT_S", 60.0)


def response(number: int, num_bytes: int = 10) -> StoredResponse:
    return StoredResponse.of(
        {"id": f"resp_{number}", "text": "x" * num_bytes}, [{"type": "message"}], [{"role": "user"}]
    )


@asynccontextmanager
async def store_of(kind: str) -> AsyncIterator[ResponseStore]:
    if kind == "memory":
        yield MemoryResponseStore(ttl_s=100, max_bytes=1 << 20)
        return
    with RedisServer() as server:
        store = RedisResponseStore(server.url, ttl_s=100)
        try:
            yield store
        finally:
            await store.close()


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_what_is_stored_is_found_by_its_owner_alone(kind: str) -> None:
    async with store_of(kind) as store:
        await store.put("me", response(1))
        assert await store.get("me", "resp_1") == response(1)
        assert await store.get("you", "resp_1") is None
        assert await store.get("me", "resp_2") is None
        assert not await store.delete("you", "resp_1")
        assert await store.delete("me", "resp_1")
        assert not await store.delete("me", "resp_1")
        assert await store.get("me", "resp_1") is None


async def test_memory_is_bounded_in_time_and_size() -> None:
    now = [0.0]
    store = MemoryResponseStore(ttl_s=10, max_bytes=3000, clock=lambda: now[0])
    for number in range(3):
        await store.put("me", response(number, 1000))
    assert await store.get("me", "resp_0") is None  # it made room
    assert await store.get("me", "resp_2") is not None
    await store.put("me", response(2, 500))  # again: it is counted once
    await store.put("me", response(3, 1000))
    assert [await store.get("me", f"resp_{number}") is not None for number in (1, 2, 3)] == [True, True, True]
    now[0] = 10.5
    assert await store.get("me", "resp_3") is None
    await store.put("me", response(4, 5000))  # more than there is room for
    assert await store.get("me", "resp_4") is None


async def test_redis_forgets_in_time_and_says_when_it_is_gone() -> None:
    with RedisServer() as server:
        store = RedisResponseStore(server.url, ttl_s=0.05)
        await store.put("me", response(1))
        async with asyncio.timeout(60):
            while await store.get("me", "resp_1") is not None:
                await asyncio.sleep(0.01)
    try:
        with pytest.raises(StoreUnavailable):
            await store.get("me", "resp_1")
        with pytest.raises(StoreUnavailable):
            await store.put("me", response(1))
    finally:
        await store.close()


async def test_a_redis_that_takes_nothing_keeps_no_router_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had been sent lay in the way, and closing waited until the server would have taken it."""
    monkeypatch.setattr(redis_client, "_CLOSE_WITHIN_S", 0.2)
    with RedisServer() as server:
        store = RedisResponseStore(server.url, ttl_s=100)
        assert await store.get("me", "resp_1") is None
        server.freeze()
        putting = asyncio.create_task(store.put("me", response(1, 32 << 20)))
        await asyncio.sleep(0.3)  # more lies there by then than any socket takes
        async with asyncio.timeout(30):
            await store.close()
    with pytest.raises(StoreUnavailable):
        await putting


async def test_a_client_that_leaves_takes_no_reply_from_the_next_one() -> None:
    async with store_of("redis") as store:
        for number in range(50):
            await store.put("me", response(number))
        for number in range(50):
            task = asyncio.create_task(store.get("me", f"resp_{number}"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for number in range(50):
            assert await store.get("me", f"resp_{number}") == response(number)
