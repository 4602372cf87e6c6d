"""Two nodes in one process, and nothing goes wrong."""

import asyncio
from dataclasses import replace
from functools import partial

from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.testing import LARGE, SMALL, Connect, Pair, random_keys, until

DEADLINE_S = 60.0


async def send_all(pair: Pair, num_blocks: int) -> None:
    """One whole transfer, with everything that must hold after it."""
    keys = random_keys(num_blocks)
    ticket = pair.ticket()
    transfer = pair.start(ticket, keys)
    await pair.sender.sender.publish(ticket, pair.outgoing(keys))
    pair.sender.sender.commit(ticket.transfer_id)
    transfer.progress(num_blocks, committed=True)
    result = await transfer.done()
    assert result.missing == ()
    assert result.num_fetched == num_blocks
    assert all(pair.is_equal(index) for index in range(num_blocks))


async def eventually_free(pair: Pair) -> None:
    """Every published block comes back soon, since nobody needs it any more."""
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: pair.sender.sender.num_leased_blocks == 0)


def _have_landed(pair: Pair, num_blocks: int) -> bool:
    return len(pair.landed) == num_blocks


async def test_every_block_arrives_as_it_was(connect: Connect) -> None:
    for layout in (SMALL, LARGE):
        async with asyncio.timeout(DEADLINE_S), connect(layout) as pair:
            await send_all(pair, 40)
            await eventually_free(pair)
            assert sorted(pair.landed) == list(range(40))
            assert set(pair.receiver.memory.writes.values()) == {1}
            assert pair.sender.released == dict.fromkeys(range(40), 1)
            assert not pair.receiver.metrics.misses


async def test_published_blocks_land_while_later_ones_are_promised(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys, ticket = random_keys(12), pair.ticket()
        transfer = pair.start(ticket, keys)
        for end in (4, 8, 12):
            await pair.sender.sender.publish(ticket, pair.outgoing(keys[end - 4 : end], end - 4))
            transfer.progress(end, committed=end == 12)
            await until(partial(_have_landed, pair, end))
        result = await transfer.done()
        assert result.num_fetched == 12
        assert 0 < result.overlapped_s <= result.transfer_s


async def test_what_was_never_published_is_missing(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys, ticket = random_keys(6), pair.ticket()
        transfer = pair.start(ticket, keys)
        await pair.sender.sender.publish(ticket, pair.outgoing(keys[:3]))
        transfer.progress(5, committed=True)  # two more than is true
        result = await transfer.done()
        assert result.missing == (3, 4, 5)
        assert pair.receiver.metrics.misses == {MissReason.ABSENT: 2}
        assert all(pair.is_equal(index) for index in range(3))


async def test_an_abort_ends_the_promises(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys, ticket = random_keys(4), pair.ticket()
        transfer = pair.start(ticket, keys)
        await pair.sender.sender.publish(ticket, pair.outgoing(keys[:2]))
        transfer.progress(2)
        await until(partial(_have_landed, pair, 2))
        transfer.abort("the prefill node was lost")
        pair.sender.sender.abort(ticket.transfer_id)
        assert (await transfer.done()).missing == (2, 3)
        await eventually_free(pair)
        assert pair.sender.released == {0: 1, 1: 1}


async def test_nothing_is_written_after_a_cancel(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(LARGE) as pair:
        for num_steps in range(0, 40, 2):
            keys, ticket = random_keys(20), pair.ticket()
            await pair.sender.sender.publish(ticket, pair.outgoing(keys))
            transfer = pair.start(ticket, keys)
            transfer.progress(20, committed=True)
            for _ in range(num_steps):
                await asyncio.sleep(0)
            transfer.cancel()
            result = await transfer.done()
            num_writes = pair.receiver.memory.writes.total()
            assert result.num_fetched + len(result.missing) == 20
            await asyncio.sleep(0.005)
            assert pair.receiver.memory.writes.total() == num_writes
            pair.sender.sender.abort(ticket.transfer_id)
        await eventually_free(pair)
        assert pair.sender.released == dict.fromkeys(range(20), 20)
        await send_all(pair, 20)


async def test_many_transfers_at_once(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(LARGE) as pair:
        await asyncio.gather(*(send_all(pair, 16) for _ in range(8)))
        await eventually_free(pair)
        assert pair.sender.released == dict.fromkeys(range(16), 8)


async def test_another_model_or_layout_is_refused(connect: Connect) -> None:
    for changes, reason in (
        ({"identity": b"x" * 32}, MissReason.IDENTITY),
        ({"receiver_layout": replace(SMALL, num_layers=4, head_dim=4)}, MissReason.LAYOUT),
    ):
        async with asyncio.timeout(DEADLINE_S), connect(**changes) as pair:
            keys, ticket = random_keys(2), pair.ticket()
            transfer = pair.start(ticket, keys)
            await pair.sender.sender.publish(ticket, pair.outgoing(keys))
            transfer.progress(2, committed=True)
            assert (await transfer.done()).missing == (0, 1)
            assert pair.receiver.metrics.misses == {reason: 4}  # each asked for twice
            assert not pair.receiver.memory.writes


async def test_a_sender_that_has_closed_is_a_miss(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys, ticket = random_keys(3), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        await pair.sender.receiver.close()
        await pair.sender.sender.close()
        assert pair.sender.released == {0: 1, 1: 1, 2: 1}
        transfer = pair.start(ticket, keys)
        transfer.progress(3, committed=True)
        result = await transfer.done()
        if pair.sender.connector.is_store:
            assert result.num_fetched == 3
        else:
            assert result.missing == (0, 1, 2)


async def test_peer_blocks_are_leased_until_released(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        if pair.sender.connector.is_store:
            return
        keys, ticket = random_keys(4), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        assert pair.sender.sender.num_leased_blocks == 4
        transfer = pair.start(ticket, keys[:2])  # all that this receiver wants
        transfer.progress(4, committed=True)
        await transfer.done()
        await eventually_free(pair)
        assert pair.sender.released == {0: 1, 1: 1, 2: 1, 3: 1}
        late = pair.start(ticket, keys)
        late.progress(4, committed=True)
        assert (await late.done()).missing == (0, 1, 2, 3)


async def test_a_lease_that_nobody_keeps_alive_ends(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(lease_s=0.2) as pair:
        keys, ticket = random_keys(2), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        await eventually_free(pair)
        assert pair.sender.released == {0: 1, 1: 1}


async def test_waiting_for_promises_keeps_the_lease_alive(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(lease_s=2.0) as pair:
        keys, ticket = random_keys(2), pair.ticket()
        transfer = pair.start(ticket, keys)
        await pair.sender.sender.publish(ticket, pair.outgoing(keys[:1]))
        transfer.progress(1)
        await asyncio.sleep(3)
        await pair.sender.sender.publish(ticket, pair.outgoing(keys[1:], 1))
        transfer.progress(2, committed=True)
        assert (await transfer.done()).missing == ()
        assert pair.sender.metrics.leases_expired == 0


async def test_a_store_is_written_once_and_read_by_anybody(connect: Connect) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys = random_keys(6)
        if not pair.sender.connector.is_store:
            assert await pair.receiver.receiver.lookup(keys) == 0
            return
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys[:4]))
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys[:5]))
        metrics = pair.sender.metrics
        assert (metrics.blocks_stored, metrics.blocks_already_stored) == (5, 4)
        assert await pair.receiver.receiver.lookup(keys) == 5
        assert await pair.receiver.receiver.lookup(keys[5:]) == 0
        result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
        assert result.missing == (5,)
        assert all(pair.is_equal(index) for index in range(5))
