"""The way of a prompt's blocks out: whatever happens on it, each block's reference goes back exactly once."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import cast

from kvasir.engine.blocks import BlockId
from kvasir.engine.request import RequestId
from kvasir.engine.step import ComputedBlocks
from kvasir.kv_connector.base import KVBlock, Ticket, TransferId
from kvasir.kv_connector.sender import KVSender
from kvasir.prefill_node.handoff import Handoff

TICKET = Ticket(transfer_id=TransferId("t"), connector="memory")


class Sender:
    """Gives back what it is given, when the transfer is aborted."""

    def __init__(self, released: Counter[BlockId]) -> None:
        self.released = released
        self.leased: list[BlockId] = []

    async def publish(self, ticket: Ticket, blocks: Sequence[KVBlock]) -> None:
        self.leased += [block.block_id for block in blocks]

    def commit(self, transfer_id: TransferId) -> None: ...

    def abort(self, transfer_id: TransferId) -> None:
        self.released.update(self.leased)
        self.leased.clear()


def computed(index: int, *, is_last: bool = False) -> ComputedBlocks:
    return ComputedBlocks(RequestId("r"), index, (BlockId(index),), (bytes([index]) * 32,), (16,), is_last)  # type: ignore[arg-type]


async def test_blocks_that_come_after_the_abort_go_back_too() -> None:
    """Also those that come before the task, which the abort has woken, has had its turn."""
    released: Counter[BlockId] = Counter()
    told: list[tuple[int, bool]] = []
    sender = Sender(released)
    handoff = Handoff(
        TICKET, cast(KVSender, sender), released.update, lambda *progress: told.append(progress), asyncio.create_task
    )
    handoff.add(computed(0))
    while not told:
        await asyncio.sleep(0)
    handoff.abort()
    handoff.add(computed(1))
    async with asyncio.timeout(60):
        while not handoff.is_done:
            await asyncio.sleep(0)
    handoff.add(computed(2, is_last=True))
    assert released == {0: 1, 1: 1, 2: 1}
    assert told == [(1, False)]


async def test_an_abort_frees_at_once_what_waits_behind_a_store_that_hangs() -> None:
    released: Counter[BlockId] = Counter()
    sender, hanging = Sender(released), asyncio.Event()

    async def publish(ticket: Ticket, blocks: Sequence[KVBlock]) -> None:
        await hanging.wait()
        sender.leased += [block.block_id for block in blocks]

    sender.publish = publish  # type: ignore[method-assign]
    handoff = Handoff(TICKET, cast(KVSender, sender), released.update, lambda *_: None, asyncio.create_task)
    handoff.add(computed(0))
    await asyncio.sleep(0)
    handoff.add(computed(1))
    handoff.add(computed(2, is_last=True))
    assert handoff.num_queued_blocks == 3
    handoff.abort()
    assert released == {1: 1, 2: 1}
    assert handoff.num_queued_blocks == 1
    hanging.set()
    async with asyncio.timeout(60):
        while not handoff.is_done:
            await asyncio.sleep(0)
    assert released == {0: 1, 1: 1, 2: 1}
    assert handoff.num_queued_blocks == 0
