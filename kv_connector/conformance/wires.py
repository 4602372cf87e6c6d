"""The connection between two nodes misbehaves. For connectors whose endpoint is a host and a TCP port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvasir.common.addresses import split_address
from kvasir.kv_connector.base import Endpoint
from kvasir.kv_connector.incoming import TransferResult
from kvasir.kv_connector.testing import LARGE, Connect, Pair, random_keys, until
from kvasir.kv_connector.testing.proxy import Proxy

_DEADLINE_S = 60.0
_NUM_BLOCKS = 24
_POSITIONS = (0, 5, 70, 300, 5_000, 300_001, 1_000_003)  # in what the sender says: greetings, headers, payloads


@asynccontextmanager
async def through_proxy(connect: Connect) -> AsyncIterator[tuple[Pair, Proxy]]:
    """Nodes without much patience."""
    async with asyncio.timeout(_DEADLINE_S), connect(LARGE, fetch_timeout_base_s=2.0, lease_s=2.0) as pair:
        endpoint = pair.sender.connector.endpoint
        if not endpoint or split_address(endpoint)[0] == "memory":
            pytest.skip("no connection of its own")
        async with Proxy(endpoint) as proxy:
            await all_is_well(pair, proxy)
            yield pair, proxy


async def transfer_through(pair: Pair, proxy: Proxy) -> TransferResult:
    """What landed is right, and was written once; what did not is missing."""
    keys = random_keys(_NUM_BLOCKS)
    ticket = replace(pair.ticket(), endpoints=(Endpoint(proxy.address),))
    await pair.sender.sender.publish(ticket, pair.outgoing(keys))
    pair.landed.clear()
    pair.receiver.memory.writes.clear()
    transfer = pair.start(ticket, keys)
    transfer.progress(_NUM_BLOCKS, committed=True)
    result = await transfer.done()
    assert sorted([*pair.landed, *result.missing]) == list(range(_NUM_BLOCKS))
    assert all(pair.is_equal(index) for index in pair.landed)
    assert pair.receiver.memory.writes == {pair.destination(index): 1 for index in pair.landed}
    return result


async def all_is_well(pair: Pair, proxy: Proxy) -> None:
    """Sooner or later everything arrives, and every block has come back."""
    while (await transfer_through(pair, proxy)).missing:  # noqa: ASYNC110  (a peer may be left alone for a while)
        await asyncio.sleep(0.1)
    await until(lambda: pair.sender.sender.num_leased_blocks == 0)


def has_landed(pair: Pair) -> bool:
    """A block, and so what was to happen then has happened."""
    return pair.at_first_block is None


async def test_a_connection_that_breaks_is_made_again(connect: Connect) -> None:
    async with through_proxy(connect) as (pair, proxy):
        pair.at_first_block = proxy.cut
        await transfer_through(pair, proxy)
        assert has_landed(pair), "nothing has landed"
        await all_is_well(pair, proxy)


async def test_a_connection_that_freezes(connect: Connect) -> None:
    async with through_proxy(connect) as (pair, proxy):
        pair.at_first_block = proxy.freeze
        await transfer_through(pair, proxy)
        assert has_landed(pair), "nothing has landed"
        await until(lambda: pair.sender.sender.num_leased_blocks == 0)  # while it is frozen: by the end of the lease
        proxy.thaw()
        await all_is_well(pair, proxy)


async def test_a_connection_that_is_cut_at_any_byte(connect: Connect) -> None:
    async with through_proxy(connect) as (pair, proxy):
        for position in _POSITIONS:
            proxy.cut()
            proxy.cut_at = proxy.num_bytes + position
            await transfer_through(pair, proxy)
        proxy.cut_at = None
        await all_is_well(pair, proxy)


async def test_a_connection_that_changes_a_bit(connect: Connect) -> None:
    async with through_proxy(connect) as (pair, proxy):
        for position in _POSITIONS:
            proxy.cut()
            proxy.flip_at = proxy.num_bytes + position
            await transfer_through(pair, proxy)
        proxy.flip_at = None
        proxy.cut()
        await all_is_well(pair, proxy)


async def test_a_connection_that_is_slow(connect: Connect) -> None:
    async with through_proxy(connect) as (pair, proxy):
        proxy.delay_s = 0.003
        await all_is_well(pair, proxy)
