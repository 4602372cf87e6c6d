"""Strangers at the port of the tcp connector: they learn nothing, and cost nothing."""

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import Endpoint
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.testing import LARGE, Node, Pair, open_node, random_keys
from kvasir.kv_connector.testing.proxy import Proxy
from tests.unit.kv_connector.tcp.strangers import (
    BEGINNINGS,
    DEADLINE_S,
    SETTINGS,
    fetch_all,
    greeting,
    stranger,
)

ENCRYPTED = replace(SETTINGS, encryption=True)


# A frame that says that more of its message will follow, and there is no end of it.
ENDLESS_FRAME = bytes([1, 200]) + bytes(200)


async def push(node: Node, beginning: bytes, seconds: float) -> None:
    """Write without end until we are cut off, or the time is over."""
    reader, writer = await asyncio.open_connection(*node.connector.endpoint.split(":"))
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            writer.write(beginning)
            while not reader.at_eof():
                writer.write(ENDLESS_FRAME * 1000)
                await writer.drain()
    writer.transport.abort()


@pytest.mark.parametrize("settings", [SETTINGS, ENCRYPTED], ids=["secret", "encryption"])
@pytest.mark.parametrize("beginning", BEGINNINGS)
async def test_a_message_without_end_from_a_stranger_takes_no_memory(
    settings: ConnectorSettings, beginning: str
) -> None:
    async with open_node(settings) as node, open_node(settings, seed=2) as other:
        assert await fetch_all(Pair(node, other)) == ()
        before = resident_bytes()
        await push(node, BEGINNINGS[beginning], seconds=3.0)
        assert resident_bytes() - before < 32 << 20
        assert await fetch_all(Pair(node, other)) == ()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_who_begins_and_says_no_more_is_cut_off() -> None:
    async def begin(node: Node, beginning: bytes) -> None:
        reader, writer = await asyncio.open_connection(*node.connector.endpoint.split(":"))
        writer.write(beginning)
        with suppress(ConnectionError):
            while await reader.read(1000):
                pass
        writer.close()

    async with open_node(SETTINGS) as node, asyncio.timeout(DEADLINE_S):
        beginnings = (b"", greeting(b"PLAIN")[:10], greeting(b"PLAIN"), BEGINNINGS["wrong password"][:-3])
        await asyncio.gather(*(begin(node, beginning) for beginning in beginnings))


@pytest.mark.parametrize("password", [b"another", protocol.keys_of("another").password])
async def test_a_wrong_password_gets_no_answer(password: bytes) -> None:
    async with open_node(SETTINGS) as node, stranger(node, password) as socket:
        await socket.send(protocol.hello(bytes(protocol.NONCE_BYTES)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await socket.recv_multipart()


class Wiretap(Proxy):
    """Keeps what the sender says."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.overheard = bytearray()

    async def _spoilt(self, data: bytes) -> bytes:
        self.overheard += data
        return await super()._spoilt(data)


@pytest.mark.parametrize("settings", [SETTINGS, ENCRYPTED], ids=["secret", "encryption"])
async def test_only_encrypted_blocks_cannot_be_read_on_the_way(settings: ConnectorSettings) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(settings, LARGE, seed=1) as sender,
        open_node(settings, LARGE, seed=2) as receiver,
        Wiretap(sender.connector.endpoint) as wire,
    ):
        pair, keys = Pair(sender, receiver), random_keys(4)
        ticket = replace(pair.ticket(), endpoints=(Endpoint(wire.address),))
        await sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(4, committed=True)
        assert (await transfer.done()).missing == ()
        assert all(pair.is_equal(index) for index in range(4))
        assert len(wire.overheard) > 4 * LARGE.bytes_per_block
        is_readable = bytes(sender.memory.read(BlockId(0))[5000:5032]) in wire.overheard
        assert is_readable == (not settings.encryption)


@pytest.mark.parametrize("sides", [(SETTINGS, ENCRYPTED), (ENCRYPTED, SETTINGS)], ids=["receiver", "sender"])
async def test_encryption_on_one_side_alone_is_a_miss(sides: tuple[ConnectorSettings, ConnectorSettings]) -> None:
    async with asyncio.timeout(DEADLINE_S), open_node(sides[0]) as sender, open_node(sides[1], seed=2) as receiver:
        assert await fetch_all(Pair(sender, receiver)) == (0, 1, 2, 3)
        assert receiver.metrics.misses == {MissReason.PEER_LOST: 4}
        assert sender.metrics.blocks_sent == 0


async def test_encryption_with_another_secret_is_a_miss() -> None:
    other = replace(ENCRYPTED, secret="another secret of the tests")
    async with asyncio.timeout(DEADLINE_S), open_node(ENCRYPTED) as sender, open_node(other, seed=2) as receiver:
        assert await fetch_all(Pair(sender, receiver)) == (0, 1, 2, 3)
        assert receiver.metrics.misses == {MissReason.PEER_LOST: 4}
        assert sender.metrics.blocks_sent == 0
