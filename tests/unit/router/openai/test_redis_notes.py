"""What is noted of streams in a real Redis: whose it is, how much of it, and what is not gone on with."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import redis.asyncio

from kvasir.router.openai import redis_notes
from kvasir.router.openai.errors import StoreUnavailable
from kvasir.router.openai.redis_notes import RedisNotes
from kvasir.router.openai.stream_notes import StreamOrigin, TakenStream
from kvasir.router.types import RoutedRequest, Sampling, TokenDelta
from tests.valkey import RedisServer

ORIGIN = StreamOrigin(response_id="cmpl-1", created=17, endpoint="completions", body=b"{}", timeout_s=5.0)
KEY = "kvasir:stream:o:cmpl-1"
REQUESTS = [RoutedRequest(request_id="r", prompt_token_ids=(1, number), sampling=Sampling(seed=9)) for number in (2, 3)]
DELTAS = [TokenDelta(0, (5,), None), TokenDelta(1, (6, 7), "stop")]


class Failures:
    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is: a server that is there has answered in time."""
    monkeypatch.setattr(redis_notes, "_TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def failures() -> Failures:
    return Failures()


@pytest.fixture
async def notes(server: RedisServer, failures: Failures) -> AsyncIterator[RedisNotes]:
    notes = RedisNotes(server.url, max_life_s=60, max_grace_s=30, max_bytes=1000, on_failure=failures)
    yield notes
    await notes.close()


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator["redis.asyncio.Redis"]:
    async with redis.asyncio.from_url(server.url) as client:
        await client.flushall()
        yield client


async def taken(notes: RedisNotes, endpoint: str = "completions") -> TakenStream | bool:
    return await notes.take("o", "cmpl-1", 3, endpoint)


async def test_what_is_taken_is_what_was_noted(notes: RedisNotes, client: "redis.asyncio.Redis") -> None:
    log = notes.new_log("o", ORIGIN, 20)
    await log.begin(REQUESTS)
    for delta in DELTAS:
        await log.add(delta)
    assert 20_000 < await client.pttl(KEY) <= 26_000
    assert await taken(notes, "chat/completions") is False
    found = await taken(notes)
    assert isinstance(found, TakenStream)
    assert found.origin == ORIGIN
    assert [one.prompt_token_ids for one in found.asked] == [(1, 2), (1, 3)]
    assert {one.seed for one in found.asked} == {9}
    assert found.deltas == DELTAS
    assert 60_000 < await client.pttl(KEY) <= 91_000
    await found.log.add(DELTAS[0])
    again = await taken(notes)
    assert isinstance(again, TakenStream)
    assert again.deltas == [*DELTAS, DELTAS[0]]
    log.forget()
    assert isinstance(await taken(notes), TakenStream), "it was not its own any more"
    again.log.forget()
    assert isinstance(await taken(notes), TakenStream)


@pytest.mark.parametrize(
    "garbage",
    [
        [b"\xff"],
        [b"", b"[1]\n"],
        [b"", b"no json\n"],
        [b"", b"[0, [1], 2, 3, 4, 5, 6]\n"],
        [b"", b'[0,[1],null,[{}],[],0,""]\n'],
    ],
)
async def test_what_another_version_has_written_is_not_there(
    notes: RedisNotes, client: "redis.asyncio.Redis", garbage: list[bytes]
) -> None:
    await client.rpush(KEY, "somebody", "completions", *garbage)
    assert await taken(notes) is False


async def test_what_is_too_much_is_not_noted_and_makes_room(
    notes: RedisNotes, client: "redis.asyncio.Redis", failures: Failures
) -> None:
    log = notes.new_log("o", ORIGIN, 20)
    await log.begin(REQUESTS)
    long = TokenDelta(0, tuple(range(100)))
    for _ in range(5):
        await log.add(long)
    assert failures.count == 1
    assert await taken(notes) is False
    other = notes.new_log("o", ORIGIN, 20)
    await other.begin(REQUESTS)
    await other.add(long)
    assert isinstance(await taken(notes), TakenStream)
    assert failures.count == 1


async def test_a_gap_ends_it(notes: RedisNotes, client: "redis.asyncio.Redis", failures: Failures) -> None:
    log = notes.new_log("o", ORIGIN, 20)
    await log.begin(REQUESTS)
    await log.add(DELTAS[0])
    await client.rpush(KEY, b"[0, [1]]\n")
    await log.add(DELTAS[0])  # as if it were sent again: the answer to the first was lost
    assert failures.count == 0
    await client.rpop(KEY, 2)
    await log.add(DELTAS[1])
    assert failures.count == 1
    assert await client.exists(KEY) == 0
    await log.add(DELTAS[1])
    assert failures.count == 1


async def test_a_server_that_is_down_is_left_alone_until_it_is_up(failures: Failures) -> None:
    with RedisServer() as server:
        notes = RedisNotes(server.url, max_life_s=60, max_grace_s=30, max_bytes=1000, on_failure=failures)
        server.kill()
        for number in (1, 2):
            await notes.new_log("o", ORIGIN, 20).begin(REQUESTS)
            assert failures.count == number
        with pytest.raises(StoreUnavailable):
            await taken(notes)
        server.start()
        async with asyncio.timeout(60):
            while True:
                await notes.new_log("o", ORIGIN, 20).begin(REQUESTS)
                try:
                    assert isinstance(await taken(notes), TakenStream)
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.05)
        await notes.close()


async def test_whatever_answers_there_for_a_while_is_asked_again(failures: Failures) -> None:
    """Even with what the client library itself cannot read."""
    with RedisServer() as server:
        notes = RedisNotes(server.url, max_life_s=60, max_grace_s=30, max_bytes=1000, on_failure=failures)
        server.kill()
        num_asked = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_asked
            await reader.read(4096)
            num_asked += 1
            writer.write(b"-MOVED nowhere\r\n")
            writer.close()

        async with asyncio.timeout(60):
            async with await asyncio.start_server(answer, "127.0.0.1", server.port):
                await notes.new_log("o", ORIGIN, 20).begin(REQUESTS)
                num_asked_at_first = num_asked
                while num_asked == num_asked_at_first:
                    await asyncio.sleep(0.05)
            server.start()
            while not isinstance(await _taken_if_up(notes), TakenStream):
                await asyncio.sleep(0.05)
        assert failures.count > 0
        await notes.close()


async def test_a_body_is_not_held_once_it_is_noted(notes: RedisNotes, client: "redis.asyncio.Redis") -> None:
    body = bytes(100)
    num_held = sys.getrefcount(body)
    log = notes.new_log("o", replace(ORIGIN, body=body), 20)
    assert sys.getrefcount(body) > num_held
    await log.begin(REQUESTS)
    assert sys.getrefcount(body) == num_held
    found = await taken(notes)
    assert isinstance(found, TakenStream)
    assert found.origin.body == body


async def _taken_if_up(notes: RedisNotes) -> TakenStream | bool:
    await notes.new_log("o", ORIGIN, 20).begin(REQUESTS)
    with suppress(StoreUnavailable):
        return await taken(notes)
    return False
