"""Who comes to the port of the tcp connector without being one of its receivers, for the tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.testing import Node, Pair, random_keys

SECRET = "a secret of the tests"
SETTINGS = ConnectorSettings(name="tcp", secret=SECRET)
DEADLINE_S = 60.0
KEYS = protocol.keys_of(SECRET)


@asynccontextmanager
async def stranger(
    node: Node, password: bytes = KEYS.password, max_unread: int = 1000
) -> AsyncIterator[zmq.asyncio.Socket]:
    """Who knows the password, it may be by listening, and nothing else."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, max_unread)
    socket.set(zmq.PLAIN_USERNAME, protocol.USER)
    socket.set(zmq.PLAIN_PASSWORD, password)
    socket.connect(f"tcp://{node.connector.endpoint}")
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield socket
    finally:
        context.destroy(linger=0)


async def shake_hands(socket: zmq.asyncio.Socket) -> None:
    nonce = bytes(protocol.NONCE_BYTES)
    await socket.send(protocol.hello(nonce))
    (challenge,) = await socket.recv_multipart()
    sender_nonce = challenge[1 : 1 + protocol.NONCE_BYTES]
    await socket.send(protocol.ANSWER + nonce + KEYS.proof(protocol.RECEIVER, nonce, sender_nonce))
    assert await socket.recv_multipart() == [protocol.WELCOME]


async def fetch_all(pair: Pair, num_blocks: int = 4) -> tuple[int, ...]:
    keys, ticket = random_keys(num_blocks), pair.ticket()
    await pair.sender.sender.publish(ticket, pair.outgoing(keys))
    transfer = pair.start(ticket, keys)
    transfer.progress(num_blocks, committed=True)
    return (await transfer.done()).missing


def greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.0, as a client."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    return bytes([4, 1 + len(name) + len(body), len(name)]) + name + body


READY = command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER")
BEGINNINGS = {  # of one who does not know the secret
    "no mechanism": greeting(b"NULL") + READY,
    "wrong password": greeting(b"PLAIN") + command(b"HELLO", b"\x06kvasir\x05wrong"),
    "no password": greeting(b"PLAIN") + READY,
    "no key": greeting(b"CURVE") + command(b"HELLO", bytes(194)),
}
