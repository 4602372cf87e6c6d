"""Replies of a sender that come otherwise than they were sent: each is a named miss, and then another try or none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import Endpoint, Frame
from kvasir.kv_connector.incoming import TransferResult
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.testing import LARGE, SMALL, Pair, open_node, random_keys, until
from tests.zmtp_proxy import Message, ZmtpProxy

DEADLINE_S = 60.0
NUM_BLOCKS = 12
HEAD = 1 + protocol.NUMBER_BYTES


@asynccontextmanager
async def pair_through(
    tampering: "Tampering", layout: KVLayout = LARGE, **changes: float
) -> AsyncIterator[tuple[Pair, ZmtpProxy]]:
    settings = replace(ConnectorSettings(name="tcp", secret="a secret of the tests"), **changes)
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(settings, layout, seed=1) as sender,
        open_node(settings, layout, seed=2) as receiver,
        ZmtpProxy(sender.connector.endpoint, tampering) as proxy,
    ):
        yield Pair(sender, receiver), proxy


async def transfer_of(pair: Pair, proxy: ZmtpProxy) -> TransferResult:
    """What landed is right and was written once, and all blocks are given back."""
    keys = random_keys(NUM_BLOCKS)
    ticket = replace(pair.ticket(), endpoints=(Endpoint(proxy.address),))
    await pair.sender.sender.publish(ticket, pair.outgoing(keys))
    pair.landed.clear()
    pair.receiver.memory.writes.clear()
    transfer = pair.start(ticket, keys)
    transfer.progress(NUM_BLOCKS, committed=True)
    result = await transfer.done()
    assert sorted([*pair.landed, *result.missing]) == list(range(NUM_BLOCKS))
    assert all(pair.is_equal(index) for index in pair.landed)
    assert pair.receiver.memory.writes == {pair.destination(index): 1 for index in pair.landed}
    await until(lambda: pair.sender.sender.num_leased_blocks == 0)
    return result


Change = Callable[[list[Message]], list[Message]]


class Tampering:
    """Holds the first few replies that bring blocks, and lets go on what `change` makes of them. Once."""

    def __init__(self, num_held: int, change: Change, word: bytes = protocol.BLOCK) -> None:
        self._num_held = num_held
        self._change = change
        self._word = word
        self._held: list[Message] = []
        self.is_over = False

    def __call__(self, message: Message) -> list[Message]:
        if message[0][:1] != self._word or self.is_over:
            return [message]
        self._held.append(message)
        if len(self._held) < self._num_held:
            return []
        self.is_over = True
        return self._change(self._held)


def numbered(message: Message, other: Message) -> Message:
    """The one under the other's number."""
    return other[0][:HEAD] + message[0][HEAD:], message[1]


def exchange(messages: list[Message]) -> list[Message]:
    one, other = messages
    return [numbered(other, one), numbered(one, other)]


def exchange_payloads(messages: list[Message]) -> list[Message]:
    (one, one_payload), (other, other_payload) = messages
    return [(one, other_payload), (other, one_payload)]


def on_a_tray(message: Message) -> Message:
    head, payload = message
    frame = Frame(head[HEAD:], memoryview(payload))
    return protocol.TRAY + protocol.entry(head[1:HEAD], frame), payload


REFUSED: dict[str, tuple[int, Change, dict[MissReason, int]]] = {
    "exchanged": (2, exchange, {MissReason.KEY: 2}),
    "payloads exchanged": (2, exchange_payloads, {MissReason.CHECKSUM: 2}),
    "cut short": (1, lambda held: [(held[0][0], held[0][1][:-1])], {MissReason.TRUNCATED: 1}),
    "empty": (1, lambda held: [(held[0][0], b"")], {MissReason.TRUNCATED: 1}),
    "without a header": (1, lambda held: [(held[0][0][:HEAD], held[0][1])], {MissReason.HEADER: 1}),
    "a header too many": (1, lambda held: [(held[0][0] + held[0][0], held[0][1])], {MissReason.HEADER: 1}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_reply_that_is_not_what_was_asked_for_is_refused_and_fetched_again(name: str) -> None:
    num_held, change, misses = REFUSED[name]
    async with pair_through(Tampering(num_held, change)) as (pair, proxy):
        assert (await transfer_of(pair, proxy)).missing == ()
        assert pair.receiver.metrics.misses == misses
        assert pair.receiver.metrics.retries == sum(misses.values())


HARMLESS: dict[str, tuple[int, Change]] = {
    "late": (5, lambda held: held),
    "in another order": (5, lambda held: held[::-1]),
    "twice": (1, lambda held: held * 2),
    "on a tray": (1, lambda held: [on_a_tray(held[0])]),
    "on a tray, one that nobody asked for": (1, lambda held: [on_a_tray((protocol.BLOCK + b"\xff" * 8, b"")), *held]),
    "again much later": (5, lambda held: [*held, *held]),
    "asked for by nobody": (1, lambda held: [(protocol.BLOCK + b"\xff" * 8, b"x" * 1000)] * 300 + held),
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_a_reply_that_comes_otherwise_is_taken_all_the_same(name: str) -> None:
    async with pair_through(Tampering(*HARMLESS[name])) as (pair, proxy):
        assert (await transfer_of(pair, proxy)).missing == ()
        assert not pair.receiver.metrics.misses


NONSENSE: dict[str, Change] = {
    "too large": lambda held: [(held[0][0], held[0][1] * 2)],
    "one frame": lambda held: [held[0][:1]],
    "three frames": lambda held: [(*held[0], b"")],
    "no number": lambda held: [(protocol.BLOCK, held[0][1])],
    "two blocks": lambda held: [held[0] * 2],
    "a tray without entries": lambda held: [(protocol.TRAY, held[0][1])],
    "a tray with half an entry": lambda held: [(on_a_tray(held[0])[0][:5], held[0][1])],
    "a tray with a header cut short": lambda held: [(on_a_tray(held[0])[0][:-1], held[0][1])],
    "a tray with a payload cut short": lambda held: [(on_a_tray(held[0])[0], held[0][1][:-1])],
    "a tray with a byte too many": lambda held: [(on_a_tray((held[0][0], held[0][1][:-1]))[0], held[0][1])],
    "a tray alone": lambda held: [on_a_tray(held[0])[:1]],
    "unknown word": lambda held: [(b"?",)],
    "nothing": lambda held: [(b"",)],
    "refusal": lambda held: [(protocol.REFUSED,)],
    "another challenge": lambda held: [(protocol.CHALLENGE + bytes(64),)],
}


async def test_a_block_larger_than_any_is_refused_before_it_is_kept() -> None:
    """Where blocks are small, frames may be larger than they are."""
    number = (0).to_bytes(protocol.NUMBER_BYTES, "little")
    tampering = Tampering(1, lambda held: [(protocol.BLOCK + number, bytes(100_000)), *held], word=protocol.TRAY)
    async with pair_through(tampering, SMALL) as (pair, proxy):
        assert (await transfer_of(pair, proxy)).missing == ()
        assert not pair.receiver.metrics.misses
        assert pair.receiver.metrics.retries > 0


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_sender_that_talks_nonsense_is_lost_and_asked_again_over_a_new_connection(name: str) -> None:
    async with pair_through(Tampering(1, NONSENSE[name])) as (pair, proxy):
        assert (await transfer_of(pair, proxy)).missing == ()
        assert not pair.receiver.metrics.misses
        assert pair.receiver.metrics.retries > 0


async def test_a_reply_that_never_comes_is_given_up() -> None:
    async with pair_through(Tampering(1, lambda held: []), fetch_timeout_base_s=1.0) as (pair, proxy):
        assert len((await transfer_of(pair, proxy)).missing) == 1
        assert pair.receiver.metrics.misses == {MissReason.TIMEOUT: 1}
        assert (await transfer_of(pair, proxy)).missing == ()


async def test_the_reply_to_a_transfer_that_was_cancelled_is_not_taken_for_the_next_ones() -> None:
    """On the same connection, under the number of the next one's request: what a pool of connections can do."""
    tampering = Tampering(2, exchange)
    async with pair_through(tampering) as (pair, proxy):
        keys = random_keys(1)
        ticket = replace(pair.ticket(), endpoints=(Endpoint(proxy.address),))
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        cancelled = pair.start(ticket, keys)
        cancelled.progress(1, committed=True)
        await until(lambda: pair.sender.metrics.blocks_sent == 1)
        cancelled.cancel()
        assert (await cancelled.done()).missing == (0,)
        pair.sender.sender.abort(ticket.transfer_id)
        assert (await transfer_of(pair, proxy)).missing == ()
        assert tampering.is_over
        assert pair.receiver.metrics.misses == {MissReason.KEY: 1}
