"""Garbage in a store: in every file of the shared folder, under every key of ours in Redis, and as Redis's answers.

KVASIR_FUZZ_INPUTS says how many inputs there are in all; `make test-fuzz` gives many.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
import redis

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.base import BlockKey, StoreKey
from kvasir.kv_connector.redis.blocks import exist, read, remove
from kvasir.kv_connector.redis.link import RedisLink
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import SMALL, Pair, pairs_of, random_keys
from tests.fuzz.mutation import mutated
from tests.fuzz.test_tcp_fuzz import NUM_INPUTS, num_open_files, resident_bytes
from tests.unit.kv_connector.redis.fake_connection import FakeConnection
from tests.valkey import RedisServer

DEADLINE_S = 120.0 + NUM_INPUTS / 100
PATIENT = {"fetch_timeout_base_s": 60.0, "lookup_timeout_s": 60.0}  # how busy this machine is decides nothing
_AT_ONCE = 25
_GROWTH_BYTES = 32 << 20


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """It would be what grows: pytest keeps each line."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Contents(Protocol):
    """What a store holds, behind the connector's back."""

    def get(self, name: StoreKey) -> bytes: ...
    def set(self, name: StoreKey, data: bytes) -> None: ...
    def spoil(self, name: StoreKey, rng: random.Random) -> None:
        """In a way of this store's own."""
        ...


class Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: StoreKey) -> bytes:
        with self._path(name).open("rb") as file:
            return file.read(8192)  # a hole may be any size

    def set(self, name: StoreKey, data: bytes) -> None:
        self._path(name).write_bytes(data)

    def spoil(self, name: StoreKey, rng: random.Random) -> None:
        with self._path(name).open("r+b") as file:
            file.truncate(rng.choice([0, 1, 4095, 4096, 1 << 20, 1 << 40]))  # a hole: the disk does not have so much

    def _path(self, name: StoreKey) -> Path:
        return self._folder / "blocks" / name


class Values:
    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)

    def get(self, name: StoreKey) -> bytes:
        return bytes(self._client.get(f"kvasir:{name}"))

    def set(self, name: StoreKey, data: bytes) -> None:
        self._client.set(f"kvasir:{name}", data)

    def spoil(self, name: StoreKey, rng: random.Random) -> None:
        value = self.get(name)
        self._client.delete(f"kvasir:{name}")
        kind = rng.randrange(4)
        if kind == 0:
            self._client.rpush(f"kvasir:{name}", value)
        elif kind == 1:
            self._client.sadd(f"kvasir:{name}", value)
        elif kind == 2:
            self._client.set(f"kvasir:{name}", bytes(rng.choice([3000, 10_000, 1 << 20])))
        else:
            fields = rng.sample(["0", "1", "2", "-1", "x", ""], rng.randint(1, 6))
            self._client.hset(f"kvasir:{name}", mapping={field: mutated(value, rng) for field in fields})

    def close(self) -> None:
        self._client.close()


def change(contents: Contents, name: StoreKey, other: StoreKey, rng: random.Random) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        contents.set(name, rng.randbytes(rng.randrange(5000)))
    elif kind == 1:
        contents.set(name, contents.get(name)[: rng.randrange(5000)])
    elif kind == 2:
        mine, others = contents.get(name), contents.get(other)
        contents.set(name, others)
        contents.set(other, mine)
    elif kind == 3:
        contents.spoil(name, rng)
    elif kind == 4:  # the lengths, and the header
        data = contents.get(name)
        contents.set(name, mutated(data[:300], rng) + data[300:])
    elif kind == 5:
        mine, others = contents.get(name), contents.get(other)
        border = rng.randrange(len(mine))
        contents.set(name, mine[:border] + others[border:])
    else:
        contents.set(name, mutated(contents.get(name), rng))


async def stored_garbage(settings: ConnectorSettings, contents: Contents, num_inputs: int, seed: int) -> None:
    """Each block lands as it was, or is missing and counted, and can be stored again. Nothing grows."""
    rng = random.Random(seed)
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings)() as pair:
        await change_and_fetch(pair, contents, rng)
        num_bytes, num_files, num_tasks = resident_bytes(), num_open_files(), len(asyncio.all_tasks())
        num_missing = 0
        for _ in range(0, num_inputs, _AT_ONCE):
            num_missing += await change_and_fetch(pair, contents, rng)
        assert num_missing > num_inputs / 2
        assert resident_bytes() - num_bytes < _GROWTH_BYTES
        assert num_open_files() <= num_files + 16  # connections that wait to be used again
        assert len(asyncio.all_tasks()) <= num_tasks


async def change_and_fetch(pair: Pair, contents: Contents, rng: random.Random) -> int:
    keys = random_keys(_AT_ONCE)
    await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
    names = [store_key(key, SMALL) for key in keys]
    for name in names:
        try:
            change(contents, name, rng.choice(names), rng)
        except (redis.ResponseError, TypeError):
            continue  # what is there is no string any more
    misses = pair.receiver.metrics.misses
    num_before = misses.total()
    missing = await fetch(pair, keys)
    assert misses.total() - num_before == 2 * len(missing)  # refused, asked for again, and refused
    assert await lookups(pair, [keys[index] for index in missing]) == 0  # removed
    await pair.receiver.connector.discard(names)  # type: ignore[union-attr]  # a store's
    return len(missing)


async def lookups(pair: Pair, keys: list[BlockKey]) -> int:
    return sum([await pair.receiver.receiver.lookup([key]) for key in keys[:3]])


async def fetch(pair: Pair, keys: list[BlockKey]) -> tuple[int, ...]:
    result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
    assert all(pair.is_equal(index) for index in range(len(keys)) if index not in result.missing)
    return result.missing


async def test_any_bytes_in_files(tmp_path: Path) -> None:
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path), **PATIENT)
    await stored_garbage(settings, Files(tmp_path), NUM_INPUTS // 3, seed=5)


async def test_any_bytes_in_values() -> None:
    with RedisServer() as server:
        contents = Values(server.port)
        settings = ConnectorSettings(name="redis", redis_url=server.url, **PATIENT)
        await stored_garbage(settings, contents, NUM_INPUTS // 3, seed=6)
        contents.close()


GOOD_ANSWERS = (
    b"+OK\r\n",
    b":1\r\n",
    b"$-1\r\n",
    b"$300\r\n" + bytes(300) + b"\r\n",
    b"-WRONGTYPE Operation against a key\r\n",
    b"-OOM command not allowed\r\n",
    b"_\r\n",
    b"*2\r\n:1\r\n:1\r\n",
    b"%1\r\n+a\r\n+b\r\n",
)
PLACES = [memoryview(bytearray(400)) for _ in range(3)]
NAMES = [b"kvasir:a", b"kvasir:b", b"kvasir:c"]
USES: tuple[Callable[[RedisLink], object], ...] = (
    lambda link: list(read(link, NAMES, PLACES, 1000)),
    lambda link: exist(link, NAMES),
    lambda link: remove(link, NAMES),
)


def test_any_answers_of_a_server() -> None:
    """They are understood, or the link ends; nothing waits for what will not come."""
    rng, num_understood = random.Random(7), 0
    num_bytes, num_files = resident_bytes(), num_open_files()
    for _ in range(NUM_INPUTS // 3):
        answers = b"".join(rng.choices(GOOD_ANSWERS, k=rng.randint(1, 8)))
        with FakeConnection() as server:
            server.answer_and_close(mutated(answers, rng))
            link = RedisLink(server, timeout_s=60.0)
            try:
                rng.choice(USES)(link)
                num_understood += 1
            except KVTransferError:
                continue
    assert 0 < num_understood < NUM_INPUTS // 3
    assert resident_bytes() - num_bytes < _GROWTH_BYTES
    assert num_open_files() <= num_files
