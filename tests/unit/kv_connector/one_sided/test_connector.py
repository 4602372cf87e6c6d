"""What nixl and mooncake share, with an engine that is always there: the suite, and what the other end may not do."""

import asyncio
import random
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from kvasir.common.addresses import split_address
from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.conformance import connect  # noqa: F401  (a fixture)
from kvasir.kv_connector.conformance.transfers import *  # noqa: F403  (tests, all of them)
from kvasir.kv_connector.conformance.transfers import eventually_free, send_all
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.one_sided import connector, protocol
from kvasir.kv_connector.one_sided.engine import Pool
from kvasir.kv_connector.one_sided.mooncake import runs
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, SMALL, ArrayMemory, Pair, pairs_of, random_keys, until
from tests.cma import CmaChannel, CmaConnector, CmaEngine

DEADLINE_S = 60.0
SETTINGS = ConnectorSettings(name=CmaConnector.name, secret="a secret of the tests")


@pytest.fixture
def settings() -> ConnectorSettings:
    return SETTINGS


@asynccontextmanager
async def pair_of(**changes: Any) -> AsyncIterator[Pair]:
    async with asyncio.timeout(DEADLINE_S), pairs_of(SETTINGS)(LARGE, **changes) as pair:
        yield pair


def engine_of(pair: Pair) -> CmaEngine:
    return cast(CmaConnector, pair.receiver.connector).engine


async def converse(pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A receiver of our own, after its handshake."""
    reader, writer = await asyncio.open_connection(*split_address(pair.sender.connector.endpoint))
    await protocol.come_in(reader, writer, SETTINGS.secret)
    return reader, writer


async def test_what_does_not_lie_in_the_pool_is_sent_along() -> None:
    async with pair_of() as pair:
        memory = pair.sender.memory
        read = memory.read
        memory.read = lambda block_id: memoryview(bytes(read(block_id)))  # type: ignore[method-assign]  # a GPU's
        await send_all(pair, 40)
        await eventually_free(pair)


async def test_a_receiver_that_never_says_that_it_is_done() -> None:
    async with pair_of(lease_s=4.0) as pair:
        keys, ticket = random_keys(4), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        reader, writer = await converse(pair)
        protocol.write(writer, protocol.FETCH, b"1", ticket.transfer_id.encode(), *keys)
        answers = [await protocol.read(reader, 1 << 20) for _ in keys]
        assert {answer[0] for answer in answers} == {protocol.LENT}
        pair.sender.sender.abort(ticket.transfer_id)
        assert pair.sender.sender.num_leased_blocks == 4, "it may still read them"
        lender = cast(CmaConnector, pair.sender.connector).engine
        assert lender.is_lending
        await eventually_free(pair)
        assert not lender.is_lending
        assert pair.sender.released == {0: 1, 1: 1, 2: 1, 3: 1}
        protocol.write(writer, protocol.DONE, b"1")  # late, and harmless
        protocol.write(writer, protocol.FETCH, b"2", ticket.transfer_id.encode(), *keys)
        assert (await protocol.read(reader, 1 << 20))[0] == protocol.ABSENT
        writer.close()


async def test_what_was_read_after_the_loan_is_thrown_away() -> None:
    async with pair_of(lease_s=4.0, fetch_timeout_base_s=20.0) as pair:
        await send_all(pair, 4)
        pair.receiver.memory.writes.clear()
        engine_of(pair).may_read.clear()
        keys, ticket = random_keys(4), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(4, committed=True)
        await until(lambda: pair.sender.metrics.blocks_sent == 8)
        pair.sender.sender.abort(ticket.transfer_id)
        await eventually_free(pair)  # and somebody else may write there
        engine_of(pair).may_read.set()
        assert (await transfer.done()).missing == (0, 1, 2, 3)
        assert not pair.receiver.memory.writes


async def test_a_read_that_hangs_costs_the_link_and_holds_its_buffer_until_it_ends() -> None:
    async with pair_of(fetch_timeout_base_s=2.0) as pair:
        await send_all(pair, 4)
        engine = engine_of(pair)
        engine.may_read.clear()
        keys, ticket = random_keys(4), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(4, committed=True)
        assert (await transfer.done()).missing == (0, 1, 2, 3)
        assert pair.receiver.metrics.misses.keys() <= {MissReason.TIMEOUT, MissReason.PEER_LOST}
        pair.sender.sender.abort(ticket.transfer_id)
        await asyncio.sleep(0.5)
        assert engine.num_closed == 0, "it is not closed under the read"
        engine.may_read.set()
        await until(lambda: engine.num_closed > 0)
        pair.receiver.memory.writes.clear()
        pair.landed.clear()
        await send_all(pair, 8)


async def test_nothing_is_read_from_a_peer_that_is_lost_as_its_answers_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has let go of it by then, or is about to on another thread."""
    reads: list[bool] = []  # of each: whether the channel was still open
    read, close = CmaChannel.read, CmaChannel.close
    closed: set[int] = set()

    def noted_read(channel: CmaChannel, *what: Any) -> None:
        reads.append(id(channel) not in closed)
        read(channel, *what)

    def noted_close(channel: CmaChannel) -> None:
        closed.add(id(channel))
        close(channel)

    monkeypatch.setattr(CmaChannel, "read", noted_read)
    monkeypatch.setattr(CmaChannel, "close", noted_close)
    async with pair_of() as pair:
        await send_all(pair, 4)
        link = await cast(CmaConnector, pair.receiver.connector)._links.of(pair.ticket())
        take = link._take

        def take_and_lose(message: Any) -> None:
            take(message)
            if all(batch.answers.done() for batch in link._batches.values()):
                link.close("it has gone")

        monkeypatch.setattr(link, "_take", take_and_lose)
        reads.clear()
        pair.receiver.memory.writes.clear()
        pair.landed.clear()
        await send_all(pair, 4)
        assert link.why_lost
        assert all(reads)
        assert len(reads) == 2, "of the new link: to get to know each other, and the blocks"


async def test_who_does_not_know_the_secret_learns_nothing() -> None:
    async with pair_of() as pair:
        reader, writer = await asyncio.open_connection(*split_address(pair.sender.connector.endpoint))
        nonce = bytes(protocol.NONCE_BYTES)
        protocol.write(writer, protocol.HELLO, nonce, protocol.number(protocol.VERSION))
        word, _, _ = await protocol.read(reader, 1 << 20)
        assert word == protocol.CHALLENGE
        protocol.write(writer, protocol.ANSWER, nonce)
        with pytest.raises(KVTransferError, match="has ended"):
            await protocol.read(reader, 1 << 20)
        writer.close()
        stranger = CmaConnector(replace(SETTINGS, secret="another"))
        await stranger.open(pair.sender.sender, 1 << 20)
        try:
            with pytest.raises(KVTransferError, match="does not know the cluster's secret"):
                await anext(stranger.fetch(pair.ticket(), random_keys(1)))
        finally:
            await stranger.close()


@pytest.mark.parametrize("said", [[], [protocol.number(3)], [protocol.number(3), b"and more"]])
async def test_another_version_is_refused_and_told_ours(said: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    async with pair_of() as pair:
        reader, writer = await asyncio.open_connection(*split_address(pair.sender.connector.endpoint))
        protocol.write(writer, protocol.HELLO, bytes(protocol.NONCE_BYTES), *said)
        assert await protocol.read(reader, 1 << 10) == [protocol.REFUSED, protocol.number(protocol.VERSION)]
        writer.close()
    theirs = 3 if said else 1
    assert f"of protocol version {theirs}; this node's is {protocol.VERSION}" in caplog.text


async def test_a_sender_of_another_version_is_a_miss_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str) -> None:
        protocol.write(writer, protocol.REFUSED, protocol.number(3))
        raise protocol.BadMessage("another version")

    async with pair_of() as pair:
        monkeypatch.setattr(protocol, "let_in", let_in)
        keys, ticket = random_keys(4), pair.ticket()
        await pair.sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = pair.start(ticket, keys)
        transfer.progress(4, committed=True)
        assert (await transfer.done()).missing == (0, 1, 2, 3)
        assert pair.receiver.metrics.misses == {MissReason.VERSION: 4}


async def test_garbage_ends_a_connection_and_nothing_else() -> None:
    rng = random.Random(5)
    async with pair_of() as pair:
        for _ in range(300):
            if rng.random() < 0.5:
                _, writer = await asyncio.open_connection(*split_address(pair.sender.connector.endpoint))
            else:
                _, writer = await converse(pair)
            if rng.random() < 0.5:
                writer.write(rng.randbytes(rng.randint(0, 200)))
            else:
                word = rng.choice([protocol.FETCH, protocol.DONE, protocol.RELEASE, protocol.HELLO, b"?"])
                protocol.write(writer, word, *(rng.randbytes(rng.randint(0, 40)) for _ in range(rng.randint(0, 6))))
            writer.close()
        await send_all(pair, 20)
        await eventually_free(pair)


async def test_nothing_is_allocated_for_a_message_that_is_too_long() -> None:
    async with pair_of() as pair:
        for is_known in (False, True):
            reader, writer = (
                await converse(pair)
                if is_known
                else await asyncio.open_connection(*split_address(pair.sender.connector.endpoint))
            )
            writer.write(struct.pack("<I", (1 << 32) - 1) + bytes(100))
            async with asyncio.timeout(60):
                while await reader.read(1 << 16):
                    pass
            writer.close()


def test_off_loopback_it_needs_the_secret_and_it_does_not_encrypt() -> None:
    with pytest.raises(ValueError, match="needs the cluster's secret"):
        CmaConnector(ConnectorSettings(listen_host="0.0.0.0"))
    with pytest.raises(ValueError, match="does not encrypt"):
        CmaConnector(ConnectorSettings(secret="s", encryption=True))


def test_a_block_is_found_by_where_its_bytes_are() -> None:
    memory = ArrayMemory(SMALL, 5)
    pool = Pool.of(memory.pool)
    assert [pool.block_at(memory.read(block)) for block in range(5)] == list(range(5))  # type: ignore[arg-type]
    assert pool.block_at(memory.read(2)[1:]) is None  # type: ignore[arg-type]
    assert pool.block_at(memoryview(bytes(SMALL.bytes_per_block))) is None
    assert pool.block_at(memoryview(b"")) is None
    shifted = memoryview(memory.pool.cast("B"))[3 : 3 + SMALL.bytes_per_block]
    assert pool.block_at(shifted) is None


@pytest.mark.parametrize("call", ["open", "close"])
async def test_an_engine_that_hangs_holds_up_nobody_for_ever(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def hang() -> None:
        monkeypatch.setattr(connector, "_ENGINE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(CmaEngine, call, lambda *_: is_over.wait())

    try:
        if call == "close":
            async with pair_of() as pair:
                await send_all(pair, 4)
                hang()
        else:
            hang()
            with pytest.raises(KVTransferError, match="does not start"):
                async with pair_of():
                    pass
    finally:
        is_over.set()


@pytest.mark.parametrize(
    ("remote", "local", "wanted"),
    [
        ([], [], []),
        ([7], [0], [(7, 0, 1)]),
        ([7, 8, 9], [0, 1, 2], [(7, 0, 3)]),
        ([7, 8, 11], [0, 1, 2], [(7, 0, 2), (11, 2, 1)]),
        ([7, 8, 9], [0, 2, 3], [(7, 0, 1), (8, 2, 2)]),
        ([9, 8, 7], [2, 1, 0], [(9, 2, 1), (8, 1, 1), (7, 0, 1)]),
    ],
)
def test_neighbours_on_both_sides_are_one_piece(remote: list[int], local: list[int], wanted: list[Any]) -> None:
    assert list(runs(remote, local)) == wanted
