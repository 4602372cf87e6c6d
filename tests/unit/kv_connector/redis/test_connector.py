"""The redis connector when the server is killed, frozen, slow, or used by others."""

import asyncio
import logging
import random
import time
from collections.abc import Iterator

import pytest
import redis

from kvasir.common.errors import KVTransferError
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.redis.connector import RedisConnector
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import LARGE, SMALL, Pair, pairs_of, random_keys, until
from tests.unit.kv_connector.store_tools import end_back_off, fetch, layout_of, settings_of
from tests.valkey import RedisServer

DEADLINE_S = 60.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """To be harmed."""
    with RedisServer() as own:
        yield own


def connector_of(pair: Pair) -> RedisConnector:
    connector = pair.receiver.connector
    assert isinstance(connector, RedisConnector)
    return connector


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_server_that_goes_away_and_comes_back(
    server: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    settings = settings_of(server, lookup_timeout_s=4.0, fetch_timeout_base_s=4.0)
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings)() as pair:
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
        end_back_off(pair)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await pair.receiver.receiver.lookup(keys) == 4
        assert await fetch(pair, keys) == ()


async def test_a_server_that_is_away_at_the_start_is_told_of_and_used_later(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))() as pair:
        assert {record.getMessage().partition(":")[0] for record in caplog.records} == {"Redis is not ready yet"}
        server.start()
        keys = random_keys(2)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()
        assert pair.sender.metrics.store_failures == 0


async def test_a_restart_between_two_requests_is_not_noticed(server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))() as pair:
        for _ in range(3):
            keys = random_keys(3)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            assert await fetch(pair, keys) == ()
            server.kill()
            server.start()
        assert pair.sender.metrics.store_failures == pair.receiver.metrics.store_failures == 0


async def test_a_server_frozen_in_mid_transfer_is_given_up_in_time(server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server, fetch_timeout_base_s=3.0))(LARGE) as pair:
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


async def test_a_fetch_that_was_cancelled_leaves_no_reply_behind(redis_server: RedisServer) -> None:
    """Seen elsewhere: a connection went back to the pool with an unread reply, and every later command on it got the
    value of the key before: another user's KV."""
    randomness = random.Random(59)
    async with asyncio.timeout(60), pairs_of(settings_of(redis_server))(LARGE) as pair:
        connector = connector_of(pair)
        keys = random_keys(50)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        names = [store_key(key, LARGE) for key in keys]

        async def read_some(num_keys: int) -> None:
            async for _ in connector.fetch(randomness.sample(names, num_keys)):
                pass

        for _ in range(100):
            task = asyncio.create_task(read_some(16))
            await asyncio.sleep(randomness.random() * 0.006)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(2):
            async for name, frame in connector.fetch(names):
                assert frame is not None
                assert frame.payload == pair.sender.memory.read(BlockId(names.index(name)))
        assert await connector.contains([*names, store_key(random_keys(1)[0], LARGE)]) == [True] * 50 + [False]
        await until(lambda: connector.pool.num_links <= connector.pool.num_idle)
        assert 1 <= connector.pool.num_idle <= 12


async def test_answers_of_a_slow_server_never_go_to_the_next_question(server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))() as pair:
        connector = connector_of(pair)
        keys = random_keys(10)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        names = [store_key(key, SMALL) for key in keys]
        for index, name in enumerate(names):
            server.freeze()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(connector.fetch([name]))
            server.thaw()
            found, frame = await anext(connector.fetch([names[-1 - index]]))
            assert found == names[-1 - index]
            assert frame is not None
            assert frame.payload == pair.sender.memory.read(BlockId(9 - index))


async def test_a_publish_that_was_cancelled_frees_its_blocks_once(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))(LARGE) as pair:
        for step in range(10):
            keys = random_keys(20)
            task = asyncio.create_task(pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys)))
            await asyncio.sleep(step * 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: pair.sender.sender.num_leased_blocks == 0)
        assert set(pair.sender.released.values()) == {pair.sender.released.total() // 20}


@pytest.mark.parametrize("num_mib", [1, 20])
async def test_a_put_that_was_cancelled_reads_no_more(redis_server: RedisServer, num_mib: int) -> None:
    """What is written to the blocks afterwards does not get into the store, and no half of a block is found there."""
    async with (
        asyncio.timeout(DEADLINE_S),
        pairs_of(settings_of(redis_server))(layout_of(num_mib), num_blocks=1) as pair,
    ):
        connector, payload = connector_of(pair), memoryview(bytearray(num_mib << 20))
        names = [store_key(key, SMALL) for key in random_keys(20)]
        whole_s = 0.0
        for step, name in enumerate(names):
            payload[:] = bytes([step + 1]) * payload.nbytes
            task = asyncio.create_task(connector.put([(name, Frame(b"a header", payload))]))
            if step == 0:
                start_s = time.perf_counter()
                await task
                whole_s = time.perf_counter() - start_s
            await asyncio.sleep(whole_s * step / len(names))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            payload[:] = bytes(payload.nbytes)
        num_stored = 0
        async for name, frame in connector.fetch(names):
            if frame is not None:
                num_stored += 1
                assert frame.payload == bytes([names.index(name) + 1]) * payload.nbytes
        assert num_stored >= 1
        await connector.discard(names)


async def test_values_that_are_not_ours(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))() as pair:
        keys = random_keys(6)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        names = [f"kvasir:{store_key(key, SMALL)}" for key in keys]
        with redis.Redis(port=redis_server.port) as client:
            client.delete(names[0])
            client.rpush(names[0], "a list")
            client.set(names[1], b"short")
            client.set(names[2], client.get(names[2])[:-1])
            client.set(names[3], client.get(names[4]))
            client.set(names[5], bytes(20 << 20))
        assert await fetch(pair, keys) == (0, 1, 2, 3, 5)
        assert pair.receiver.metrics.misses == {
            MissReason.HEADER: 6,  # each asked for twice
            MissReason.TRUNCATED: 2,
            MissReason.KEY: 2,
        }
        assert await pair.receiver.receiver.lookup(keys) == 0  # removed
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


async def test_what_is_read_lives_its_time_anew(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server, redis_prefix="other"))() as pair:
        keys = random_keys(2)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        names = [f"other:{store_key(key, SMALL)}" for key in keys]
        with redis.Redis(port=redis_server.port) as client:
            assert all(3_500_000 < client.pttl(name) <= 3_600_000 for name in names)
            for name in names:
                client.pexpire(name, 60_000)
            assert await fetch(pair, keys[:1]) == ()
            assert [client.pttl(name) > 60_000 for name in names] == [True, False]


async def test_blocks_beyond_all_measure_are_refused_at_start(redis_server: RedisServer) -> None:
    with pytest.raises(ValueError, match="too large for Redis"):
        await RedisConnector(settings_of(redis_server)).open(None, 2 << 30)  # type: ignore[arg-type]
