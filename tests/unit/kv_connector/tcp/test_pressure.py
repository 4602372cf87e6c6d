"""Receivers that ask and do not read: what a sender lends stays within its bounds, and others are served."""

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.utils import garbage

from kvasir.kv_connector.base import BlockKey, Ticket
from kvasir.kv_connector.tcp import lending, protocol
from kvasir.kv_connector.testing import LARGE, Node, Pair, open_node, random_keys, until
from tests.unit.kv_connector.tcp.strangers import DEADLINE_S, SETTINGS, fetch_all, shake_hands, stranger

NUM_BLOCKS = 40


MEDIUM = replace(LARGE, num_layers=2)  # 48 KiB: by trays


async def ask_for_all(socket: zmq.asyncio.Socket, ticket: Ticket, keys: list[BlockKey]) -> None:
    await socket.send(protocol.fetch(0, ticket.transfer_id, keys))


async def publish(node: Node) -> tuple[Ticket, list[BlockKey]]:
    pair, keys = Pair(node, node), random_keys(NUM_BLOCKS)
    ticket = pair.ticket()
    await node.sender.publish(ticket, pair.outgoing(keys))
    return ticket, keys


async def test_who_does_not_read_holds_up_nobody_else() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(SETTINGS, LARGE, num_blocks=64) as node,
        open_node(SETTINGS, LARGE, seed=2) as other,
        stranger(node, max_unread=1) as idle,
    ):
        ticket, keys = await publish(node)
        await shake_hands(idle)
        for _ in range(2 * protocol.MAX_REQUESTS_PER_PEER // NUM_BLOCKS):
            await ask_for_all(idle, ticket, keys)
        await until(lambda: node.sender.num_borrowed_blocks > 0)
        assert await fetch_all(Pair(node, other)) == ()
        assert node.sender.num_borrowed_blocks <= protocol.MAX_REQUESTS_PER_PEER + 4  # the other one's
        node.sender.abort(ticket.transfer_id)


async def test_what_is_lent_in_all_is_bounded_and_what_waits_is_lent_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_MAX_LENT", 6)
    most = 0
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(open_node(SETTINGS, LARGE, num_blocks=64))
        ticket, keys = await publish(node)
        readers = [await stack.enter_async_context(stranger(node)) for _ in range(4)]
        for reader in readers:
            await shake_hands(reader)
            await ask_for_all(reader, ticket, keys)

        async def read_all(reader: zmq.asyncio.Socket) -> None:
            nonlocal most
            for _ in keys:
                assert (await reader.recv_multipart())[0][:1] == protocol.BLOCK
                most = max(most, node.sender.num_borrowed_blocks)

        await asyncio.gather(*(read_all(reader) for reader in readers))
        assert 0 < most <= 6
        node.sender.abort(ticket.transfer_id)
        await until(lambda: node.sender.num_leased_blocks == 0)


async def test_receivers_that_vanish_while_they_wait_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_MAX_LENT", 6)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(SETTINGS, LARGE, num_blocks=64) as node,
        open_node(SETTINGS, LARGE, seed=2) as other,
    ):
        ticket, keys = await publish(node)
        async with AsyncExitStack() as stack:
            for _ in range(4):
                reader = await stack.enter_async_context(stranger(node, max_unread=1))
                await shake_hands(reader)
                await ask_for_all(reader, ticket, keys)
            await until(lambda: node.sender.num_borrowed_blocks > 0)
        node.sender.abort(ticket.transfer_id)
        await until(lambda: node.sender.num_leased_blocks == 0)
        assert await fetch_all(Pair(node, other)) == ()


async def test_who_does_not_read_keeps_trays_from_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """While all trays are on their way to one who does not read, small blocks are lent one by one."""
    monkeypatch.setattr(lending, "_NUM_TRAYS", 2)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(SETTINGS, MEDIUM, num_blocks=64) as node,
        open_node(SETTINGS, MEDIUM, num_blocks=64, seed=2) as other,
    ):
        lender = node.connector._server.lender  # type: ignore[union-attr]
        async with stranger(node, max_unread=1) as idle:
            ticket, keys = await publish(node)
            await shake_hands(idle)
            for _ in range(2 * protocol.MAX_REQUESTS_PER_PEER // NUM_BLOCKS):
                await ask_for_all(idle, ticket, keys)
            await until(lambda: lender.num_lent > 0 and not lender._trays)
            assert await fetch_all(Pair(node, other)) == ()
            assert node.sender.num_borrowed_blocks <= protocol.MAX_REQUESTS_PER_PEER + 4  # the other one's
        node.sender.abort(ticket.transfer_id)
        await until(lambda: node.sender.num_leased_blocks == 0)
        assert len(lender._trays) == 2


@pytest.mark.parametrize("num_trays", [0, 1, 16])
async def test_small_blocks_come_by_trays_or_without(num_trays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_NUM_TRAYS", num_trays)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(SETTINGS, MEDIUM, num_blocks=64) as node,
        open_node(SETTINGS, MEDIUM, num_blocks=64, seed=2) as other,
    ):
        pair, keys = Pair(node, other), random_keys(NUM_BLOCKS)
        ticket = pair.ticket()
        await node.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(NUM_BLOCKS, committed=True)
        assert (await transfer.done()).missing == ()
        assert all(pair.is_equal(index) for index in range(NUM_BLOCKS))
        await until(lambda: node.sender.num_leased_blocks == 0)


class Stuck(dict[Any, Any]):
    """What zmq has let go of, of which Python's own thread does not hear for a while."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_go_on = threading.Event()

    def pop(self, *args: Any) -> Any:
        self.may_go_on.wait(DEADLINE_S)
        return super().pop(*args)


async def test_a_fast_receiver_has_not_asked_for_too_many_where_python_is_slow_to_hear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_blocks = 2 * protocol.MAX_REQUESTS_PER_PEER
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(SETTINGS, MEDIUM, num_blocks=num_blocks + 64) as node,
        open_node(SETTINGS, MEDIUM, num_blocks=num_blocks + 64, seed=2) as other,
    ):
        pair = Pair(node, other, num_blocks=num_blocks + 64)
        assert await fetch_all(pair) == ()
        await until(lambda: node.sender.num_leased_blocks == 0)
        stuck = Stuck(garbage.gc.refs)
        monkeypatch.setattr(garbage.gc, "refs", stuck)
        keys, ticket = random_keys(num_blocks), pair.ticket()
        await node.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(num_blocks, committed=True)
        try:
            await until(lambda: node.sender.num_borrowed_blocks == protocol.MAX_REQUESTS_PER_PEER)
            await asyncio.sleep(0.1)
            assert node.sender.num_borrowed_blocks == protocol.MAX_REQUESTS_PER_PEER
        finally:
            stuck.may_go_on.set()
        assert (await transfer.done()).missing == ()
        await until(lambda: node.sender.num_leased_blocks == 0)
