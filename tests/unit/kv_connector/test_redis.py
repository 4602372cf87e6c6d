"""The redis connector when the server is killed, frozen, full, evicting, or used by others."""

import asyncio
import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from kvasir.common.errors import KVTransferError
from kvasir.engine.types import BlockId
from kvasir.kv_connector.header import store_key
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.redis import RedisConnector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, SMALL, Pair, pairs_of, random_keys
from tests.valkey import RedisServer

DEADLINE_S = 40.0
BIG = replace(LARGE, num_layers=8 * 85)  # 16 MB a block


def settings_of(server: RedisServer, **changes: float) -> ConnectorSettings:
    quick = {"store_backoff_s": 0.2, "fetch_timeout_base_s": 2.0, **changes}
    return ConnectorSettings(name="redis", redis_url=server.url, **quick)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """To be harmed."""
    with RedisServer() as own:
        yield own


async def fetch(pair: Pair, keys: list) -> tuple[int, ...]:  # type: ignore[type-arg]
    result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
    assert all(pair.is_equal(index) for index in range(len(keys)) if index not in result.missing)
    return result.missing


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_server_that_goes_away_and_comes_back(
    server: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server, lookup_timeout_s=0.5))() as pair:
        keys = random_keys(4)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        getattr(server, how)()
        caplog.clear()
        for _ in range(3):
            with pytest.raises(KVTransferError):
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(4)))
        assert pair.sender.metrics.store_failures == 1
        assert pair.sender.released == {BlockId(index): 4 for index in range(4)}
        assert await pair.receiver.receiver.lookup(keys) == 0
        assert await fetch(pair, keys) == (0, 1, 2, 3)
        assert pair.receiver.metrics.misses == {MissReason.STORE_DOWN: 4}
        assert len(caplog.records) == 2  # one line for writing, one for reading
        server.thaw() if how == "freeze" else server.start()
        await asyncio.sleep(0.3)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await pair.receiver.receiver.lookup(keys) == 4
        assert await fetch(pair, keys) == ()


async def test_a_server_frozen_in_mid_transfer_is_given_up_in_time(server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server, fetch_timeout_base_s=1.0))(LARGE) as pair:
        keys = random_keys(40)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))

        def strike(index: int, is_exact: bool) -> None:
            if not pair.landed:
                server.freeze()
            pair.landed.append(index)

        result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), strike).done()
        assert 1 <= result.num_fetched == len(pair.landed) < 40
        assert pair.receiver.metrics.store_failures == 1
        assert pair.receiver.memory.writes.total() == len(pair.landed)


async def test_a_full_server_refuses_and_is_still_read() -> None:
    """A value counts twice while it is written, so that one is refused which would fit."""
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "noeviction") as server:
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))(BIG, num_blocks=8) as pair:
            first, second = random_keys(1), random_keys(6)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(first))
            with pytest.raises(KVTransferError, match="Redis refuses: OOM"):
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(second))
            assert pair.sender.metrics.store_failures == 1
            assert pair.sender.sender.num_leased_blocks == 0
            assert await fetch(pair, first) == ()
            with redis.Redis(port=server.port) as client:
                client.flushall()
            await asyncio.sleep(0.3)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(first))
            assert await fetch(pair, first) == ()


async def test_what_a_server_has_evicted_is_absent() -> None:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))(BIG, num_blocks=8) as pair:
            keys = random_keys(6)
            for index, key in enumerate(keys):
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing([key], index))
            missing = await fetch(pair, keys)
            assert 1 <= len(missing) < 6
            assert pair.receiver.metrics.misses == {MissReason.ABSENT: len(missing)}


async def test_a_fetch_that_was_cancelled_leaves_no_reply_behind(redis_server: RedisServer) -> None:
    """Seen elsewhere: a connection went back to the pool with an unread reply, and every later command on it got the
    value of the key before: another user's KV."""
    randomness = random.Random(59)
    async with asyncio.timeout(60), pairs_of(settings_of(redis_server))(LARGE) as pair:
        connector = pair.receiver.connector
        assert isinstance(connector, RedisConnector)
        keys = random_keys(50)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        names = [store_key(key, LARGE) for key in keys]

        async def read_some(num_keys: int) -> None:
            async for _ in connector.fetch(randomness.sample(names, num_keys)):
                pass

        for _ in range(100):
            task = asyncio.create_task(read_some(8))
            await asyncio.sleep(randomness.random() * 0.004)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(2):
            async for name, frame in connector.fetch(names):
                index = names.index(name)
                assert frame is not None
                assert frame.payload == pair.sender.memory.read(BlockId(index))
        assert await connector.contains([*names, store_key(random_keys(1)[0], LARGE)]) == [True] * 50 + [False]
        with redis.Redis(port=redis_server.port) as client:
            assert len(client.client_list()) < 20


async def test_a_put_that_was_cancelled_frees_its_blocks_once(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))(LARGE) as pair:
        for step in range(10):
            keys = random_keys(20)
            task = asyncio.create_task(pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys)))
            await asyncio.sleep(step * 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await pair.sender.sender.close()
        assert set(pair.sender.released.values()) == {pair.sender.released.total() // 20}
        assert pair.sender.sender.num_leased_blocks == 0


async def test_values_that_are_not_ours(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))() as pair:
        keys = random_keys(5)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        names = [f"kvasir:{store_key(key, SMALL)}" for key in keys]
        with redis.Redis(port=redis_server.port) as client:
            assert 0 < client.pttl(names[0]) <= 3_600_000
            client.delete(names[0])
            client.rpush(names[0], "a list")
            client.set(names[1], b"short")
            client.set(names[2], client.get(names[2])[:-1])
            client.set(names[3], client.get(names[4]))
        assert await fetch(pair, keys) == (0, 1, 2, 3)
        assert pair.receiver.metrics.misses == {
            MissReason.HEADER: 4,
            MissReason.TRUNCATED: 2,
            MissReason.KEY: 2,
        }
        assert await pair.receiver.receiver.lookup(keys) == 0  # removed


async def test_blocks_beyond_what_a_value_can_hold_are_refused_at_start(redis_server: RedisServer) -> None:
    huge = replace(SMALL, num_layers=2 * 1024 * 1024)
    with pytest.raises(ValueError, match="too large for Redis"):
        await RedisConnector(settings_of(redis_server)).open(None, huge.bytes_per_block)  # type: ignore[arg-type]
