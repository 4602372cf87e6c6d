"""Garbage on the wire of the tcp connector: at the sender's port, from receivers, and from senders.

KVASIR_FUZZ_INPUTS says how many inputs there are in all; `make test-fuzz` gives many.
"""

import asyncio
import logging
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq

from kvasir.kv_connector.base import BlockKey, Endpoint, Ticket, TransferId
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.tcp.doorkeeper import Doorkeeper
from kvasir.kv_connector.tcp.loop_socket import LoopSocket
from kvasir.kv_connector.testing import Node, Pair, open_node, random_keys, until
from tests.fuzz.mutation import mutated
from tests.unit.kv_connector.tcp.strangers import (
    BEGINNINGS,
    KEYS,
    SETTINGS,
    command,
    fetch_all,
    greeting,
    shake_hands,
    stranger,
)

NUM_INPUTS = int(os.environ.get("KVASIR_FUZZ_INPUTS", 3000))
DEADLINE_S = 120.0 + NUM_INPUTS / 100
_CONNECTIONS_AT_ONCE = 16
_MESSAGES_A_CONNECTION = 50
_KNOWN = greeting(b"PLAIN") + command(b"HELLO", b"\x06kvasir" + bytes([len(KEYS.password)]) + KEYS.password)


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """It would be what grows: pytest keeps each line."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@asynccontextmanager
async def unharmed() -> AsyncIterator[Pair]:
    """Two nodes; afterwards they serve as before, hold nothing, and have not grown."""
    async with asyncio.timeout(DEADLINE_S), open_node(SETTINGS, seed=1) as sender, open_node(SETTINGS, seed=2) as other:
        pair = Pair(sender, other)
        assert await fetch_all(pair) == ()
        num_tasks, num_bytes, num_files = len(asyncio.all_tasks()), resident_bytes(), num_open_files()
        yield pair
        await until(lambda: num_open_files() <= num_files + 2)
        assert await fetch_all(pair) == ()
        await until(lambda: sender.sender.num_leased_blocks == 0 and len(asyncio.all_tasks()) <= num_tasks)
        assert resident_bytes() - num_bytes < 32 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_any_bytes_at_the_port() -> None:
    rng = random.Random(1)
    async with unharmed() as pair:
        inputs = raw_inputs(NUM_INPUTS // 5, rng)

        async def throw_all() -> None:
            for data in inputs:
                await throw(pair.sender, data)

        await asyncio.gather(*(throw_all() for _ in range(_CONNECTIONS_AT_ONCE)))


async def throw(node: Node, data: bytes) -> None:
    reader, writer = await asyncio.open_connection(*node.connector.endpoint.split(":"))
    ours = writer.get_extra_info("socket")
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that the kernel forgets it
    with suppress(ConnectionError, TimeoutError):
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(0.002):
            await reader.read(100)
    writer.transport.abort()


def raw_inputs(number: int, rng: random.Random) -> Iterator[bytes]:
    """Random; a handshake gone wrong; or what follows a good one: frames of any flags and lengths."""
    for _ in range(number):
        kind = rng.randrange(4)
        if kind == 0:
            yield rng.randbytes(rng.randrange(300))
        elif kind == 1:
            yield mutated(rng.choice([*BEGINNINGS.values(), _KNOWN]), rng)
        elif kind == 2:
            length = rng.choice([0, 1, 200, 2048, 2200, 1 << 20, 1 << 31, 1 << 63, (1 << 64) - 1])
            yield _KNOWN + bytes([rng.randrange(256)]) + length.to_bytes(8, "big") + rng.randbytes(rng.randrange(3000))
        else:
            frames = (
                bytes([rng.randrange(2), n := rng.randrange(256)]) + rng.randbytes(n) for _ in range(rng.randrange(20))
            )
            yield _KNOWN + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER") + b"".join(frames)


async def test_any_messages_from_a_receiver() -> None:
    rng = random.Random(2)
    async with unharmed() as pair:
        node, ticket, keys = pair.sender, pair.ticket(), random_keys(8)
        await node.sender.publish(ticket, pair.outgoing(keys))
        good = [
            protocol.hello(bytes(32)),
            protocol.ANSWER + bytes(64),
            protocol.fetch(1, ticket.transfer_id, keys),
            protocol.fetch(2, TransferId("unknown"), keys[:1]),
            protocol.KEEP_ALIVE + ticket.transfer_id.encode(),
            protocol.RELEASE + b"unknown",
        ]
        for start in range(0, NUM_INPUTS // 2, _MESSAGES_A_CONNECTION):
            async with stranger(node) as peer:
                if start % (2 * _MESSAGES_A_CONNECTION):
                    await shake_hands(peer)
                for _ in range(_MESSAGES_A_CONNECTION):
                    frames = [
                        mutated(rng.choice(good), rng) for _ in range(1 if rng.random() < 0.9 else rng.randint(2, 5))
                    ]
                    await peer.send_multipart(frames)
                    with suppress(zmq.Again):
                        await peer.recv_multipart(zmq.NOBLOCK)
        node.sender.abort(ticket.transfer_id)


class FuzzySender:
    """Proves that it knows the secret, and answers each request by garbage, and then by the block."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self._node = node
        self._rng = rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        protocol.configure(router, protocol.MAX_REQUEST_BYTES, False)
        protocol.guard_sender(router, KEYS, False)
        self._door = Doorkeeper(self._context, protocol.USER, KEYS.password)
        self._socket = LoopSocket(router, self._answer)
        self.address = f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        self.num_inputs = 0

    def close(self) -> None:
        self._socket.close()
        self._door.close()
        self._context.destroy(linger=0)

    def _answer(self, message: list[zmq.Frame]) -> None:
        peer, request = (frame.bytes for frame in message)
        word, rest = request[:1], request[1:]
        if word == protocol.HELLO:
            _, theirs = protocol.parse_hello(rest) or (0, b"")
            nonce = bytes(protocol.NONCE_BYTES)
            self._say(peer, protocol.CHALLENGE + nonce + KEYS.proof(protocol.SENDER, theirs, nonce))
        elif word == protocol.ANSWER:
            self._say(peer, protocol.WELCOME)
        elif word == protocol.FETCH and (fetch := protocol.parse_fetch(rest)):
            number, transfer_id, keys = fetch
            for offset, key in enumerate(keys):
                self._fetched(peer, protocol.number(number + offset), transfer_id, key)

    def _fetched(self, peer: bytes, number: bytes, transfer_id: TransferId, key: BlockKey) -> None:
        rng, frame = self._rng, self._node.sender.borrow(transfer_id, key)
        if frame is None:
            self._say(peer, protocol.ABSENT + number)
            return
        head, payload = protocol.BLOCK + number + frame.header, bytes(frame.payload)
        entry = protocol.entry(number, frame)
        self._node.sender.give_back(transfer_id, key)
        for _ in range(rng.choice([0, 1, 4])):
            self.num_inputs += 1
            kind = rng.random()
            if kind < 0.45:
                self._say(peer, protocol.BLOCK + number + mutated(frame.header, rng), payload)
            elif kind < 0.9:
                self._say(peer, head, mutated(payload, rng))
            elif kind < 0.94:
                self._say(peer, mutated(head, rng), payload)
            elif kind < 0.98:
                self._say(peer, protocol.TRAY + mutated(entry, rng), payload)
            else:
                self._say(peer, *(mutated(head, rng)[:100] for _ in range(rng.randint(1, 4))))
        if rng.random() < 0.5:
            self._say(peer, head, payload)
        else:
            self._say(peer, protocol.TRAY + entry, payload)

    def _say(self, *frames: bytes) -> None:
        with suppress(zmq.ZMQError):
            self._socket.send(*frames)


async def test_any_replies_from_a_sender() -> None:
    async with unharmed() as pair:
        fuzzy, num_landed = FuzzySender(pair.sender, random.Random(3)), 0
        try:
            while fuzzy.num_inputs < NUM_INPUTS * 3 // 10:
                ticket = Ticket(
                    transfer_id=pair.ticket().transfer_id, connector="tcp", endpoints=(Endpoint(fuzzy.address),)
                )
                keys = random_keys(20)
                pair.landed.clear()
                await pair.sender.sender.publish(ticket, pair.outgoing(keys))
                transfer = pair.start(ticket, keys)
                transfer.progress(len(keys), committed=True)
                result = await transfer.done()
                assert sorted([*pair.landed, *result.missing]) == list(range(len(keys)))
                assert all(pair.is_equal(index) for index in pair.landed)
                pair.sender.sender.abort(ticket.transfer_id)
                num_landed += len(pair.landed)
            assert num_landed > fuzzy.num_inputs / 50, "hardly anything got as far as being looked at"
        finally:
            fuzzy.close()
