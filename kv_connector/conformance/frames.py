"""Whatever a connector hands over, a wanted block arrives as it was or is missing, and a counter says why."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvasir.kv_connector.incoming import TransferResult
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import Pair, open_node, random_keys
from kvasir.kv_connector.testing.faulty import Fault, Faults, Faulty

DEADLINE_S = 60.0
NUM_BLOCKS = 6

REFUSED = {
    "truncate": MissReason.TRUNCATED,
    "flip": MissReason.CHECKSUM,
    "header": MissReason.HEADER,
    "swap": MissReason.KEY,
    "identity": MissReason.IDENTITY,
    "layout": MissReason.LAYOUT,
    "tokens": MissReason.TOKENS,
    "codec": MissReason.CODEC,
}


@asynccontextmanager
async def faulty_pair(settings: ConnectorSettings, script: Sequence[Fault]) -> AsyncIterator[tuple[Pair, Faults]]:
    faulty: Any = Faulty(open_connector(settings), script)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(settings, seed=1) as sender,
        open_node(settings, seed=2, connector=faulty) as receiver,
    ):
        yield Pair(sender, receiver), faulty.faults


async def transfer_of(pair: Pair) -> TransferResult:
    keys, ticket = random_keys(NUM_BLOCKS), pair.ticket()
    await pair.sender.sender.publish(ticket, pair.outgoing(keys))
    transfer = pair.start(ticket, keys)
    transfer.progress(NUM_BLOCKS, committed=True)
    result = await transfer.done()
    landed = set(range(NUM_BLOCKS)) - set(result.missing)
    assert all(pair.is_equal(index) for index in landed)
    assert pair.receiver.memory.writes == {pair.destination(index): 1 for index in landed}
    return result


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_block_refused_once_is_fetched_again(settings: ConnectorSettings, kind: str) -> None:
    fault = Fault(kind=kind, block=3)
    async with faulty_pair(settings, [fault]) as (pair, faults):
        assert (await transfer_of(pair)).missing == ()
        assert faults.struck == {fault: 1}
        assert pair.receiver.metrics.misses == {REFUSED[kind]: 1}
        assert pair.receiver.metrics.retries == 1


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_block_refused_twice_is_missing(settings: ConnectorSettings, kind: str) -> None:
    # On the second attempt it is the first frame, and has none before it to be swapped with: so swap two of them.
    blocks = (2, 3) if kind == "swap" else (3,)
    faults_wanted = [Fault(kind=kind, block=block, times=1 if block == 2 else 2) for block in blocks]
    async with faulty_pair(settings, faults_wanted) as (pair, _):
        assert (await transfer_of(pair)).missing == (3,)
        assert pair.receiver.metrics.misses == {REFUSED[kind]: sum(fault.times for fault in faults_wanted)}
        assert pair.receiver.metrics.blocks_fetched == NUM_BLOCKS - 1


async def test_what_a_store_gave_twice_unusable_is_removed_from_it(settings: ConnectorSettings) -> None:
    async with faulty_pair(settings, [Fault(kind="flip", block=3, times=2)]) as (pair, _):
        if not pair.sender.connector.is_store:
            return
        keys = random_keys(NUM_BLOCKS)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert (await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()).missing == (3,)
        assert await pair.receiver.receiver.lookup(keys) == 3
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert pair.sender.metrics.blocks_stored == NUM_BLOCKS + 1
        assert await pair.receiver.receiver.lookup(keys) == NUM_BLOCKS


async def test_another_epoch_is_refused_from_a_peer_and_welcome_from_a_store(settings: ConnectorSettings) -> None:
    async with faulty_pair(settings, [Fault(kind="epoch", block=3, times=2)]) as (pair, _):
        result = await transfer_of(pair)
        if pair.sender.connector.is_store:
            assert result.missing == ()
        else:
            assert result.missing == (3,)
            assert pair.receiver.metrics.misses == {MissReason.EPOCH: 2}


@pytest.mark.parametrize("kind", ["delay", "duplicate", "reorder", "drop"])
async def test_harmless_faults(settings: ConnectorSettings, kind: str) -> None:
    async with faulty_pair(settings, [Fault(kind=kind, block=3)]) as (pair, faults):
        assert (await transfer_of(pair)).missing == ()
        assert sum(faults.struck.values()) == 1
        assert not pair.receiver.metrics.misses
        assert pair.receiver.metrics.retries == (1 if kind == "drop" else 0)


async def test_a_block_that_is_not_there_is_not_asked_for_again(settings: ConnectorSettings) -> None:
    async with faulty_pair(settings, [Fault(kind="absent", block=3)]) as (pair, _):
        assert (await transfer_of(pair)).missing == (3,)
        assert pair.receiver.metrics.misses == {MissReason.ABSENT: 1}


async def test_a_source_lost_once_is_tried_again(settings: ConnectorSettings) -> None:
    async with faulty_pair(settings, [Fault(kind="lost", block=3)]) as (pair, _):
        result = await transfer_of(pair)
        if pair.sender.connector.is_store:  # is left alone instead
            assert result.missing == (3, 4, 5)
            assert pair.receiver.metrics.misses == {MissReason.STORE_DOWN: 3}
            assert pair.receiver.metrics.store_failures == 1
        else:
            assert result.missing == ()
            assert pair.receiver.metrics.retries == 3


async def test_a_peer_lost_twice_is_given_up(settings: ConnectorSettings) -> None:
    async with faulty_pair(settings, [Fault(kind="lost", block=3, times=2)]) as (pair, _):
        assert (await transfer_of(pair)).missing == (3, 4, 5)
        lost = MissReason.STORE_DOWN if pair.sender.connector.is_store else MissReason.PEER_LOST
        assert pair.receiver.metrics.misses == {lost: 3}


async def test_a_block_that_is_late_is_given_up(settings: ConnectorSettings) -> None:
    hasty = replace(settings, fetch_timeout_base_s=2.0)
    async with faulty_pair(hasty, [Fault(kind="delay", block=NUM_BLOCKS + 3, delay_s=30.0)]) as (pair, _):
        await transfer_of(pair)  # so that the nodes have met
        pair.receiver.memory.writes.clear()
        pair.receiver.metrics.misses.clear()
        assert (await transfer_of(pair)).missing == (3, 4, 5)
        assert pair.receiver.metrics.misses == {MissReason.TIMEOUT: 3}
