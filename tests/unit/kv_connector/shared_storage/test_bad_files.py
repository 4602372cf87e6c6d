"""Files that are torn, foreign, or cannot be read or written."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import SMALL, Connect, random_keys, until
from tests.unit.kv_connector.shared_storage.conftest import (
    DEADLINE_S,
    file_of,
    files,
    listing,
)
from tests.unit.kv_connector.store_tools import end_back_off, fetch


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swell(path: Path) -> None:
    os.truncate(path, 1 << 40)  # sparse: nobody may allocate what its size says


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, MissReason.TRUNCATED),
        (flip, MissReason.CHECKSUM),
        (empty, MissReason.HEADER),
        (swell, MissReason.HEADER),
        (link_elsewhere, MissReason.HEADER),
        (make_fifo, MissReason.HEADER),
    ],
)
async def test_a_bad_file_is_a_miss_and_is_removed(
    connect: Connect, settings: ConnectorSettings, harm: Callable[[Path], None], reason: MissReason
) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys = random_keys(4)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        path = file_of(settings, store_key(keys[2], SMALL))
        harm(path)
        assert await fetch(pair, keys) == (2,)
        assert pair.receiver.metrics.misses == {reason: 2}
        assert path not in listing(settings)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
async def test_a_disk_that_fails_in_mid_write(
    connect: Connect, settings: ConnectorSettings, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    real_writev = os.writev

    def fail_in_the_middle(descriptor: int, parts: list[memoryview]) -> int:
        if parts[0].nbytes < 1000:
            return real_writev(descriptor, [parts[0]])  # the header still found room
        raise OSError(error, os.strerror(error))

    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys = random_keys(3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", fail_in_the_middle)
            with pytest.raises(KVTransferError, match=os.strerror(error)):
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert files(settings) == []
        assert pair.sender.metrics.store_failures == 1
        assert pair.sender.released == {BlockId(index): 1 for index in range(3)}
        end_back_off(pair)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ESTALE, {MissReason.ABSENT: 1}),  # removed by another machine
        (errno.EACCES, {MissReason.HEADER: 2}),  # another user's
        (errno.EIO, {MissReason.HEADER: 2}),  # the disk has lost it
        (errno.EUCLEAN, {MissReason.HEADER: 2}),  # the file system is damaged there
    ],
)
async def test_a_file_that_cannot_be_opened(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, error: int, reason: dict[MissReason, int]
) -> None:
    """A miss, again and again; all others, and the store, are as good as before."""
    real_open, keys = os.open, random_keys(3)
    name = store_key(keys[2], SMALL)

    def open_but_one(path: str, *args: int, **more: int) -> int:
        if path == name:
            raise OSError(error, os.strerror(error), path)
        return real_open(path, *args, **more)

    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        monkeypatch.setattr(os, "open", open_but_one)
        assert await fetch(pair, keys) == (2,)
        assert pair.receiver.metrics.misses == reason
        assert await fetch(pair, keys[2:]) == (0,)
        assert await fetch(pair, keys[:2]) == ()
        assert pair.receiver.metrics.store_failures == 0


@pytest.mark.parametrize("num_at_once", [1, 6])
async def test_a_disk_that_reads_nothing_is_left_alone(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, num_at_once: int
) -> None:
    def fail(descriptor: int, parts: list[memoryview]) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    keys = random_keys(6)
    async with asyncio.timeout(DEADLINE_S), connect(num_blocks=8) as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        with monkeypatch.context() as patch:
            patch.setattr(os, "readv", fail)
            for start in range(0, 6, num_at_once):
                assert await fetch(pair, keys[start : start + num_at_once]) == tuple(range(num_at_once))
        assert pair.receiver.metrics.store_failures == 1
        end_back_off(pair)
        assert set(await fetch(pair, keys)) <= {0, 1, 2}, "the first ones may have been taken for bad files"


async def test_a_file_of_which_nothing_can_be_told_is_not_there(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, settings: ConnectorSettings
) -> None:
    real_stat, keys = os.stat, random_keys(3)
    name = store_key(keys[1], SMALL)

    def stat_but_one(path: str, *args: int, **more: int) -> os.stat_result:
        if path == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real_stat(path, *args, **more)

    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", stat_but_one)
            assert await pair.receiver.receiver.lookup(keys) == 1
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert pair.sender.metrics.blocks_stored == 4
        assert pair.receiver.metrics.store_failures == pair.sender.metrics.store_failures == 0


async def test_a_file_system_that_hangs_keeps_nobody(
    connect: Connect, settings: ConnectorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system does when its server is away: calls do not return, and cannot be interrupted."""
    goes_on = threading.Event()
    real_readv, num_hanging = os.readv, 0

    def hang(descriptor: int, parts: list[memoryview]) -> int:
        nonlocal num_hanging
        num_hanging += 1
        goes_on.wait(DEADLINE_S)
        num_bytes = real_readv(descriptor, parts)
        num_hanging -= 1
        return num_bytes

    async with asyncio.timeout(DEADLINE_S), connect(fetch_timeout_base_s=2.0) as pair:
        keys = random_keys(4)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        with monkeypatch.context() as patch:
            patch.setattr(os, "readv", hang)
            assert await fetch(pair, keys) == (0, 1, 2, 3)
            assert pair.receiver.metrics.misses == {MissReason.TIMEOUT: 4}
            assert pair.receiver.metrics.store_failures == 1
            assert not pair.receiver.memory.writes
        assert num_hanging > 0
        goes_on.set()  # too late: the blocks may be somebody else's by now
        await until(lambda: num_hanging == 0)
        end_back_off(pair)
        assert not pair.receiver.memory.writes
        assert await fetch(pair, keys) == ()
