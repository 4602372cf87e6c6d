"""A rolling upgrade: two nodes whose tcp connectors do not speak alike say so, and compute what they cannot fetch."""

import asyncio
import logging

import pytest

from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.testing import Node, Pair, open_node
from tests.unit.kv_connector.tcp.strangers import DEADLINE_S, SETTINGS, fetch_all, stranger

OTHER = protocol.VERSION + 1


async def reply_to(node: Node, message: bytes) -> list[bytes]:
    async with stranger(node) as socket:
        await socket.send(message)
        return await socket.recv_multipart()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("greeting", "version"),
    [(b"", 1), (OTHER.to_bytes(2, "little"), OTHER), (b"\xff\xff", 65535)],
    ids=["the first, which said none", "the next", "the last"],
)
async def test_a_receiver_of_another_version_is_refused_and_told_ours(
    greeting: bytes, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_node(SETTINGS) as node:
        reply = await reply_to(node, protocol.HELLO + greeting + bytes(protocol.NONCE_BYTES))
    assert reply == [protocol.REFUSED + protocol.VERSION.to_bytes(2, "little")]
    assert f"of protocol version {version}; this node's is {protocol.VERSION}" in caplog.text


async def test_what_a_later_version_adds_to_its_greeting_does_not_hide_which_one_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_node(SETTINGS) as node:
        await reply_to(node, protocol.HELLO + OTHER.to_bytes(2, "little") + bytes(100))
    assert f"version {OTHER};" in caplog.text


@pytest.mark.parametrize("refusal", [b"", OTHER.to_bytes(2, "little"), OTHER.to_bytes(2, "little") + b"and more"])
async def test_a_sender_of_another_version_is_a_miss_by_that_name(
    refusal: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before long, and also while it is left alone."""
    caplog.set_level(logging.INFO)
    async with asyncio.timeout(DEADLINE_S), open_node(SETTINGS) as sender, open_node(SETTINGS, seed=2) as receiver:
        monkeypatch.setattr(protocol, "parse_hello", lambda greeting: None)  # as one who does not understand it
        monkeypatch.setattr(protocol, "refused", lambda: protocol.REFUSED + refusal)
        pair = Pair(sender, receiver)
        assert await fetch_all(pair) == (0, 1, 2, 3)
        assert await fetch_all(pair, 2) == (0, 1)
        assert receiver.metrics.misses == {MissReason.VERSION: 6}
        assert sender.metrics.blocks_sent == 0
    theirs = OTHER if refusal else 1
    assert f"it speaks version {theirs} of the protocol, this node {protocol.VERSION}" in caplog.text


async def test_a_peer_that_comes_back_in_this_version_is_fetched_from(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(DEADLINE_S), open_node(SETTINGS) as sender, open_node(SETTINGS, seed=2) as receiver:
        pair = Pair(sender, receiver)
        with monkeypatch.context() as older:
            older.setattr(protocol, "VERSION", OTHER)
            older.setattr(protocol, "hello", lambda nonce: protocol.HELLO + bytes(2) + nonce)
            assert await fetch_all(pair) == (0, 1, 2, 3)
        while await fetch_all(pair):  # it is left alone for a while
            await asyncio.sleep(0.05)
