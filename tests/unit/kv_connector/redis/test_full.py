"""The redis connector where there is little room: large blocks, a server that is full, one that evicts."""

import asyncio

import pytest
import redis

from kvasir.common.errors import KVTransferError
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.redis.blocks import PIECE_BYTES
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import Pair, pairs_of, random_keys
from tests.unit.kv_connector.store_tools import end_back_off, fetch, layout_of, settings_of
from tests.valkey import RedisServer

DEADLINE_S = 60.0
SMALL_SERVER = ("--maxmemory", "64mb", "--maxmemory-policy")


async def publish(pair: Pair, keys: list) -> None:  # type: ignore[type-arg]
    await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))


@pytest.mark.parametrize(("num_mib", "num_blocks"), [(1, 2), (40, 1), (70, 1)])
async def test_blocks_of_any_size(redis_server: RedisServer, num_mib: int, num_blocks: int) -> None:
    settings = settings_of(redis_server, redis_prefix="sizes")
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings)(layout_of(num_mib), num_blocks=num_blocks) as pair:
        keys = random_keys(num_blocks)
        await publish(pair, keys)
        with redis.Redis(port=redis_server.port) as client:
            names = [f"sizes:{store_key(key, layout_of(num_mib))}" for key in keys]
            assert sorted(client.scan_iter("sizes:*")) == sorted(name.encode() for name in names)
            assert all(client.pttl(name) > 3_500_000 for name in names)
            if num_mib > 8:
                assert max(client.hstrlen(names[0], field) for field in client.hkeys(names[0])) <= PIECE_BYTES
            assert await pair.receiver.receiver.lookup(keys) == num_blocks
            assert await fetch(pair, keys) == ()
            assert not pair.receiver.metrics.misses
            client.delete(*names)


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
async def test_a_small_server_and_blocks_of_1_40_and_70_mib(policy: str) -> None:
    """Seen elsewhere: a value counts twice while it is written, so that one is refused which would fit."""
    with RedisServer(*SMALL_SERVER, policy) as server:
        for num_mib, is_room in ((1, True), (40, True), (70, False)):
            async with (
                asyncio.timeout(DEADLINE_S),
                pairs_of(settings_of(server))(layout_of(num_mib), num_blocks=1) as pair,
            ):
                keys = random_keys(1)
                if is_room:
                    await publish(pair, keys)
                    assert await fetch(pair, keys) == ()
                else:
                    with pytest.raises(KVTransferError, match=r"refuses: OOM|was evicted while it was written"):
                        await publish(pair, keys)
                    assert pair.sender.metrics.store_failures == 1
                    assert pair.sender.released == {BlockId(0): 1}
                    assert await fetch(pair, keys) == (0,)
                    assert pair.receiver.metrics.misses == {MissReason.ABSENT: 1}
            with redis.Redis(port=server.port) as client:
                assert client.dbsize() == (1 if is_room else 0)  # nothing of what was refused
                client.flushall()


async def test_a_full_server_refuses_and_is_still_read_and_works_again_when_there_is_room() -> None:
    with RedisServer(*SMALL_SERVER, "noeviction") as server:
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))(layout_of(16), num_blocks=5) as pair:
            first, second = random_keys(1), random_keys(5)
            await publish(pair, first)
            with pytest.raises(KVTransferError, match="Redis refuses: OOM"):
                await publish(pair, second)
            assert pair.sender.metrics.store_failures == 1
            assert pair.sender.sender.num_leased_blocks == 0
            assert await fetch(pair, first) == ()
            with redis.Redis(port=server.port) as client:
                client.flushall()
            end_back_off(pair)
            await publish(pair, first)
            assert await fetch(pair, first) == ()


async def test_what_a_server_has_evicted_is_absent() -> None:
    with RedisServer(*SMALL_SERVER, "allkeys-lru") as server:
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))(layout_of(3), num_blocks=30) as pair:
            keys = random_keys(30)
            await publish(pair, keys)
            missing = await fetch(pair, keys)
            assert 1 <= len(missing) < 30
            assert pair.receiver.metrics.misses == {MissReason.ABSENT: len(missing)}


async def test_evicted_between_the_lookup_and_the_fetch(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))() as pair:
        keys = random_keys(3)
        await publish(pair, keys)
        assert await pair.receiver.receiver.lookup(keys) == 3
        with redis.Redis(port=redis_server.port) as client:
            client.delete(f"kvasir:{store_key(keys[1], pair.sender.memory.layout)}")
        assert await fetch(pair, keys) == (1,)
        assert pair.receiver.metrics.misses == {MissReason.ABSENT: 1}


@pytest.mark.parametrize("harm", ["no last piece", "no first piece", "another's piece"])
async def test_a_block_of_which_a_piece_is_wrong(redis_server: RedisServer, harm: str) -> None:
    layout = layout_of(10)
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))(layout, num_blocks=2) as pair:
        keys = random_keys(2)
        await publish(pair, keys)
        one, other = (f"kvasir:{store_key(key, layout)}" for key in keys)
        with redis.Redis(port=redis_server.port) as client:
            if harm == "no last piece":
                client.hdel(one, "1")
            elif harm == "no first piece":
                client.hdel(one, "0")
            else:
                client.hset(one, "1", client.hget(other, "1"))
        assert await fetch(pair, keys) == (0,)
        assert pair.receiver.metrics.misses.total() == 2
        assert set(pair.receiver.metrics.misses) <= {MissReason.TRUNCATED, MissReason.HEADER, MissReason.CHECKSUM}
        assert await pair.receiver.receiver.lookup(keys) == 0  # removed, to be written again
