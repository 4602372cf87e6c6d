"""The tcp connector against strangers, garbage and peers that keep to no rule."""

import asyncio
import os
import time
from dataclasses import replace

import pytest

from kvasir.cli.ports import free_port
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import Endpoint, Ticket, TransferId
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.tcp import server as tcp_server
from kvasir.kv_connector.tcp.connector import TcpConnector
from kvasir.kv_connector.tcp.link import Link
from kvasir.kv_connector.testing import LARGE, SMALL, Pair, open_node, pairs_of, random_keys, until
from tests.unit.kv_connector.tcp.strangers import DEADLINE_S, KEYS, SECRET, SETTINGS, fetch_all, shake_hands, stranger


async def test_another_secret_fetches_nothing() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(SETTINGS) as sender,
        open_node(ConnectorSettings(name="tcp", secret="another"), seed=2) as receiver,
    ):
        pair = Pair(sender, receiver)
        assert await fetch_all(pair) == (0, 1, 2, 3)
        assert receiver.metrics.misses == {MissReason.PEER_LOST: 4}
        assert sender.metrics.blocks_sent == 0


async def test_who_knows_the_password_alone_is_refused_whatever_it_says() -> None:
    async with open_node(SETTINGS) as node, stranger(node) as socket:
        keys = random_keys(1)
        await node.sender.publish(Ticket(transfer_id=TransferId("t"), connector="tcp"), Pair(node, node).outgoing(keys))
        for message in (
            [protocol.fetch(0, TransferId("t"), keys)],
            [protocol.RELEASE + b"t"],
            [protocol.ANSWER + bytes(protocol.NONCE_BYTES) + bytes(32)],
            [protocol.ANSWER],
            [protocol.HELLO],
            [protocol.hello(bytes(protocol.NONCE_BYTES)), b""],
            [b""],
            [b"?" * 500, b"x"],
        ):
            await socket.send_multipart(message)
            assert await socket.recv_multipart() == [protocol.refused()]
        assert node.sender.num_leased_blocks == 1
        assert node.metrics.blocks_sent == 0


async def test_requests_that_make_no_sense_are_refused() -> None:
    async with open_node(SETTINGS) as node, stranger(node) as socket:
        await shake_hands(socket)
        for request in (b"", bytes(8), bytes(9), bytes(8) + b"\xff" + bytes(40), bytes(9 + 33), bytes(9 + 32 * 49)):
            await socket.send(protocol.FETCH + request)
            assert await socket.recv_multipart() == [protocol.refused()]
        await socket.send(protocol.fetch(7, TransferId("unknown"), random_keys(2)))
        assert await socket.recv_multipart() == [protocol.ABSENT + protocol.number(7)]
        assert await socket.recv_multipart() == [protocol.ABSENT + protocol.number(8)]


async def test_an_answer_overheard_on_one_connection_is_worth_nothing_on_another() -> None:
    nonce = os.urandom(protocol.NONCE_BYTES)
    async with open_node(SETTINGS) as node, stranger(node) as one, stranger(node) as other:
        await one.send(protocol.hello(nonce))
        (challenge,) = await one.recv_multipart()
        proof = KEYS.proof(protocol.RECEIVER, nonce, challenge[1 : 1 + protocol.NONCE_BYTES])
        await one.send(protocol.ANSWER + nonce + proof)
        assert await one.recv_multipart() == [protocol.WELCOME]
        await other.send(protocol.ANSWER + nonce + proof)
        assert await other.recv_multipart() == [protocol.refused()]


async def test_a_frame_that_is_too_large_ends_the_connection_and_not_the_node() -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(SETTINGS)() as pair:
        async with stranger(pair.sender) as socket:
            await socket.send(protocol.HELLO + bytes(protocol.MAX_REQUEST_BYTES + 100))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await socket.recv_multipart()
        assert await fetch_all(pair) == ()


async def test_a_sender_of_larger_blocks_is_a_miss() -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(SETTINGS)(replace(LARGE, num_layers=24), SMALL) as pair:
        assert await fetch_all(pair) == (0, 1, 2, 3)
        assert pair.receiver.metrics.misses == {MissReason.PEER_LOST: 4}  # cut off before a byte of it is stored


async def test_one_connection_cannot_borrow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks and does not read is lent a bounded number of blocks, and told that the others are not there."""
    monkeypatch.setattr(protocol, "MAX_REQUESTS_PER_PEER", 8)
    async with open_node(SETTINGS, LARGE) as node, stranger(node, max_unread=1) as socket:
        keys = random_keys(60)
        ticket = Ticket(transfer_id=TransferId("t"), connector="tcp")
        await node.sender.publish(ticket, Pair(node, node).outgoing(keys))
        await shake_hands(socket)
        for index, key in enumerate(keys):
            await socket.send(protocol.fetch(index, ticket.transfer_id, [key]))
        words = [(await socket.recv_multipart())[0][:1] for _ in keys]
        assert set(words) == {protocol.BLOCK, protocol.ABSENT}
        assert node.metrics.blocks_sent == words.count(protocol.BLOCK)
        node.sender.abort(ticket.transfer_id)
        await until(lambda: node.sender.num_leased_blocks == 0)


async def test_what_zmq_has_let_go_of_does_not_count_before_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that reads all that it asks for can ask for more, however seldom the sender looks."""
    monkeypatch.setattr(protocol, "MAX_REQUESTS_PER_PEER", 8)
    monkeypatch.setattr(tcp_server, "_POLL_S", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S), open_node(SETTINGS, LARGE) as node, stranger(node) as socket:
        keys = random_keys(32)
        ticket = Ticket(transfer_id=TransferId("t"), connector="tcp")
        await node.sender.publish(ticket, Pair(node, node).outgoing(keys))
        await shake_hands(socket)
        server = node.connector._server  # type: ignore[union-attr]
        for start in range(0, len(keys), 4):
            await socket.send(protocol.fetch(start, ticket.transfer_id, keys[start : start + 4]))
            for _ in range(4):
                assert (await socket.recv_multipart())[0][:1] == protocol.BLOCK
            await until(lambda: sum(not loan.is_over for loan in server.lender._loans) <= 4)
        monkeypatch.undo()
        node.sender.abort(ticket.transfer_id)


async def test_a_restarted_sender_at_the_same_address_does_not_know_the_ticket() -> None:
    async with asyncio.timeout(DEADLINE_S), open_node(SETTINGS, seed=2) as receiver:
        settings = replace(SETTINGS, listen_port=free_port())
        async with open_node(settings, seed=1) as sender:
            pair = Pair(sender, receiver)
            keys, ticket = random_keys(4), pair.ticket()
            await sender.sender.publish(ticket, pair.outgoing(keys))
            transfer = pair.start(ticket, keys)
            transfer.progress(2)
            await until(lambda: len(pair.landed) == 2)
        async with open_node(settings, seed=3) as restarted:
            other = Pair(restarted, receiver)
            await restarted.sender.publish(other.ticket(), other.outgoing(keys))
            transfer.progress(4, committed=True)
            assert (await transfer.done()).missing == (2, 3)
            assert receiver.metrics.misses == {MissReason.ABSENT: 2}


async def test_a_port_that_somebody_else_has_leaves_nothing_open() -> None:
    async with open_node(SETTINGS) as node:
        taken = replace(SETTINGS, listen_port=int(node.connector.endpoint.rpartition(":")[2]))
        connector = TcpConnector(taken)
        with pytest.raises(OSError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
            await connector.open(node.sender, 1000)
        async with asyncio.timeout(DEADLINE_S):
            await connector.close()


async def test_a_receiver_that_is_held_up_as_it_is_let_in_does_not_blame_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prove = Link._prove

    def prove_and_stall(link: Link, rest: bytes) -> None:
        prove(link, rest)
        asyncio.get_running_loop().call_soon(time.sleep, 2.5)

    monkeypatch.setattr(Link, "_prove", prove_and_stall)
    async with asyncio.timeout(DEADLINE_S), pairs_of(SETTINGS)() as pair:
        assert await fetch_all(pair) == ()
        assert pair.receiver.metrics.retries == 0


async def test_nobody_at_the_address() -> None:
    async with asyncio.timeout(DEADLINE_S), pairs_of(SETTINGS)() as pair:
        for address in ("127.0.0.1:1", "no-such-host.invalid:80", "not an address", ""):
            ticket = Ticket(transfer_id=TransferId("t"), connector="tcp", endpoints=(Endpoint(address),))
            transfer = pair.start(ticket, random_keys(2))
            transfer.progress(2, committed=True)
            assert (await transfer.done()).missing == (0, 1)


async def test_the_window_bounds_what_is_asked_for_and_not_taken_in() -> None:
    settings = ConnectorSettings(name="tcp", secret=SECRET, window_bytes=4 * LARGE.bytes_per_block * 4 // 3)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(settings, LARGE) as sender,
        open_node(settings, LARGE) as receiver,
    ):
        pair = Pair(sender, receiver)
        keys, ticket = random_keys(40), pair.ticket()
        await sender.sender.publish(ticket, pair.outgoing(keys))
        frames = receiver.connector.fetch(ticket, keys)  # type: ignore[call-arg, arg-type]
        await anext(frames)
        await asyncio.sleep(0.3)  # a reader that takes its time
        assert sender.metrics.blocks_sent <= 6
        await frames.aclose()
        sender.sender.abort(ticket.transfer_id)
        await until(lambda: sender.sender.num_leased_blocks == 0)
        assert sender.released == {BlockId(index): 1 for index in range(40)}


async def test_a_ticket_with_a_name_too_long_for_the_wire_is_none() -> None:
    """It spoilt the link that all transfers from there share: a release of it was too large for the sender."""
    with pytest.raises(ValueError, match="at most 255 bytes, got 256"):
        Ticket(transfer_id=TransferId("é" * 128), connector="tcp")
    with pytest.raises(ValueError, match="at most 256 endpoints, got 257"):
        Ticket(transfer_id=TransferId("t"), connector="tcp", endpoints=(Endpoint("a:1"),) * 257)
    longest = Ticket(transfer_id=TransferId("t" * 255), connector="tcp")
    async with asyncio.timeout(DEADLINE_S), open_node(SETTINGS) as sender, open_node(SETTINGS, seed=2) as receiver:
        pair, keys = Pair(sender, receiver), random_keys(60)
        ticket = replace(longest, endpoints=(Endpoint(sender.connector.endpoint),))
        await sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(len(keys), committed=True)
        assert (await transfer.done()).missing == ()
        await until(lambda: sender.sender.num_leased_blocks == 0)
