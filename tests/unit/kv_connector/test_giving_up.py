"""A transfer that is slower than computing: given up, remembered, and tried again."""

import asyncio

import pytest

from kvasir.kv_connector.costs import CostRule
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.testing import SMALL, until
from tests.unit.kv_connector.test_incoming import World

DEADLINE_S = 60.0
QUICK = CostRule(always_fetch_s=0.01, patience_s=0.05)


async def test_nothing_comes_for_as_long_as_computing_takes() -> None:
    world = World(lambda num_tokens: 0.002 * num_tokens, costs=QUICK)
    world.source.may_deliver.clear()
    world.transfer.progress(2)
    async with asyncio.timeout(DEADLINE_S):
        result = await world.transfer.done()
    assert result.missing == (0, 1, 2, 3), "what is promised would come no faster"
    assert world.metrics.misses == {MissReason.SLOW: 4}
    assert world.metrics.declined == 1
    assert world.source.num_finished == 1, "the sender may let go of the ticket"


async def test_what_has_landed_is_kept() -> None:
    world = World(lambda num_tokens: 0.02 * num_tokens, costs=QUICK)
    world.transfer.progress(2)
    await until(lambda: len(world.landed) == 2)
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    async with asyncio.timeout(DEADLINE_S):
        assert (await world.transfer.done()).missing == (2, 3)
    assert world.metrics.misses == {MissReason.SLOW: 2}


async def test_a_source_known_to_be_slow_is_not_asked_at_all() -> None:
    world = World(lambda num_tokens: 0.1, costs=QUICK)
    world.meter.note(1, 10.0)
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == (0, 1, 2, 3)
    assert world.source.asked == []
    assert world.source.num_finished == 1


async def test_a_recovered_source_is_found_out_by_one_who_asks_after_a_while() -> None:
    world = World(lambda num_tokens: 0.1, costs=CostRule(forget_after_s=0.0))
    world.meter.note(1, 10.0)
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == ()
    assert world.metrics.declined == 0


async def test_without_a_cost_of_computing_only_the_deadline_counts() -> None:
    world = World(costs=QUICK, fetch_timeout_base_s=0.3)
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    async with asyncio.timeout(DEADLINE_S):
        assert (await world.transfer.done()).missing == (0, 1, 2, 3)
    assert world.metrics.misses == {MissReason.TIMEOUT: 4}
    assert world.metrics.declined == 0


async def test_a_stall_is_remembered_of_the_source() -> None:
    world = World(lambda num_tokens: 0.001, costs=CostRule(patience_s=0.3))
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    async with asyncio.timeout(DEADLINE_S):
        await world.transfer.done()
    bandwidth = world.meter.bandwidth_bytes_per_s
    assert bandwidth is not None
    assert bandwidth < SMALL.bytes_per_block


async def test_a_deadline_grows_where_the_path_was_measured_to_be_slow() -> None:
    """Slow and steady, it is no reason to recompute where that costs more still."""
    world = World(fetch_timeout_base_s=0.05, min_bandwidth_bytes_per_s=8 * SMALL.bytes_per_block)  # 0.5 s for all
    world.meter.note(SMALL.bytes_per_block, 0.25)  # a block in a quarter of a second, and so 4 s
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    await asyncio.sleep(0.7)
    world.source.may_deliver.set()
    async with asyncio.timeout(DEADLINE_S):
        assert (await world.transfer.done()).missing == ()


async def test_while_one_block_takes_its_time_the_lease_is_kept_alive() -> None:
    world = World(lease_s=0.03)
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    await until(lambda: world.source.num_kept_alive > 1)
    world.source.may_deliver.set()
    assert (await world.transfer.done()).missing == ()


async def test_a_verdict_on_all_that_is_promised_weighs_all_of_it() -> None:
    """A first block by itself, of a source whose latency is longer than computing that block, gave up the rest."""
    world = World(lambda num_tokens: 0.01 * num_tokens, costs=CostRule(always_fetch_s=0.0))
    world.meter.note_latency(0.3)
    world.meter.note(SMALL.bytes_per_block * 1000, 0.001)
    world.transfer.progress(1)  # 16 tokens: 0.16 s to compute; all of them: 0.64 s
    await until(lambda: world.landed or world.metrics.declined)
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == ()


async def test_the_patience_with_a_source_is_that_for_all_that_is_promised() -> None:
    world = World(lambda num_tokens: 0.1 * num_tokens, costs=CostRule(always_fetch_s=0.0, patience_s=0.0))
    world.source.may_deliver.clear()
    world.transfer.progress(1)
    await asyncio.sleep(1.8)  # longer than that block takes to be computed, and far shorter than all of them
    world.source.may_deliver.set()
    await until(lambda: world.landed or world.metrics.declined)
    world.transfer.cancel()
    await world.transfer.done()
    assert world.landed == [0]


async def test_after_a_stall_there_is_a_deadline_all_the_same() -> None:
    """Of the next to nothing that was measured, it used to be made a deadline of days."""
    world = World(fetch_timeout_base_s=0.1)
    world.meter.note(0, 5.0)
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    async with asyncio.timeout(DEADLINE_S):
        assert (await world.transfer.done()).missing == (0, 1, 2, 3)
    assert world.metrics.misses == {MissReason.TIMEOUT: 4}


@pytest.mark.parametrize("landed_first", [0, 1])
async def test_a_cancel_while_waiting_gives_no_verdict(landed_first: int) -> None:
    world = World(lambda num_tokens: 10.0, costs=QUICK)
    world.transfer.progress(landed_first)
    await until(lambda: len(world.landed) == landed_first)
    world.source.may_deliver.clear()
    world.transfer.progress(4)
    await asyncio.sleep(0)
    world.transfer.cancel()
    await world.transfer.done()
    assert world.metrics.declined == 0
    assert world.meter.rate is None
