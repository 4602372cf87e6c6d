"""The shared folder when files are torn, foreign or late, the disk is full, or a writer dies."""

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.engine.types import BlockId
from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.header import store_key
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage import SharedStorageConnector
from kvasir.kv_connector.testing import LARGE, SMALL, Connect, Pair, open_node, pairs_of, random_keys, until

DEADLINE_S = 40.0


@pytest.fixture
def settings(tmp_path: Path) -> ConnectorSettings:
    return ConnectorSettings(name="shared_storage", path=str(tmp_path / "store"), store_backoff_s=0.2)


@pytest.fixture
def connect(settings: ConnectorSettings) -> Connect:
    return pairs_of(settings)


def files(settings: ConnectorSettings) -> list[Path]:
    return sorted(path for path in Path(settings.path).rglob("*") if path.is_file())


def listing(settings: ConnectorSettings) -> list[Path]:
    """Links, pipes and all."""
    return list(Path(settings.path).rglob("*"))


def file_of(settings: ConnectorSettings, name: StoreKey) -> Path:
    return Path(settings.path) / "blocks" / name[:2] / name


async def fetch(pair: Pair, keys: list) -> tuple[int, ...]:  # type: ignore[type-arg]
    result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
    assert all(pair.is_equal(index) for index in range(len(keys)) if index not in result.missing)
    return result.missing


async def test_files_are_for_their_owner_only(connect: Connect, settings: ConnectorSettings) -> None:
    async with connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(3)))
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(settings)] == [0o600] * 3
    folders = {path.parent for path in files(settings)} | {Path(settings.path) / "blocks"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


async def test_a_name_that_is_no_hash_builds_no_path(connect: Connect, settings: ConnectorSettings) -> None:
    async with connect() as pair:
        connector = pair.sender.connector
        assert isinstance(connector, SharedStorageConnector)
        for name in ("../../etc/passwd", "a" * 64, f"{'a' * 62}/x-exact-float32-0-1", f"{'g' * 64}-exact", ".", ""):
            key = StoreKey(name)
            with pytest.raises(ValueError, match="not the name of a stored block"):
                await connector.put([(key, Frame(b"", memoryview(b"")))])
            with pytest.raises(ValueError, match="not the name of a stored block"):
                await connector.contains([key])
            with pytest.raises(ValueError, match="not the name of a stored block"):
                await anext(connector.fetch([key]))
            with pytest.raises(ValueError, match="not the name of a stored block"):
                await connector.discard([key])
        assert files(settings) == []


async def test_two_writers_of_the_same_blocks_at_once(settings: ConnectorSettings) -> None:
    """Seen elsewhere: both wrote to one staging name; one renamed what the other had just truncated."""
    async with (
        asyncio.timeout(DEADLINE_S),
        open_node(settings, LARGE, seed=1) as one,
        open_node(settings, LARGE, seed=1) as other,
        open_node(settings, LARGE, seed=2) as reader,
    ):
        pair = Pair(one, reader)
        for _ in range(20):
            keys = random_keys(4)
            await asyncio.gather(
                one.sender.publish(pair.ticket(), pair.outgoing(keys)),
                other.sender.publish(pair.ticket(), pair.outgoing(keys)),
            )
            assert await fetch(pair, keys) == ()
        assert not reader.metrics.misses
        assert len(files(settings)) == 80


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


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
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
        await asyncio.sleep(0.3)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


def write_and_be_killed(settings: ConnectorSettings) -> None:
    code = f"""
import asyncio, os, signal
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import *

def die(descriptor, parts, writev=os.writev):
    writev(descriptor, [parts[0], parts[1][:1000]])
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with pairs_of(ConnectorSettings(name="shared_storage", path={settings.path!r}))() as pair:
        os.writev = die
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing([bytes(32)]))

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL


async def test_a_writer_killed_in_mid_write_leaves_nothing_that_counts(
    connect: Connect, settings: ConnectorSettings
) -> None:
    write_and_be_killed(settings)
    (left,) = files(settings)
    assert left.name.endswith(".tmp")
    long_ago_s = time.time() - 3600
    os.utime(left, (long_ago_s, long_ago_s))
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys = [bytes(32)]
        assert await pair.receiver.receiver.lookup(keys) == 0
        assert await fetch(pair, keys) == (0,)
        await until(lambda: files(settings) == [])


async def test_a_restarted_node_finds_what_it_stored_before(connect: Connect) -> None:
    keys = random_keys(4)
    async with connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
    async with connect() as pair:
        assert await pair.receiver.receiver.lookup(keys) == 4
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert pair.sender.metrics.blocks_stored == 0
        assert await fetch(pair, keys) == ()


async def test_what_is_too_old_goes_and_what_is_not_ours_stays(connect: Connect, settings: ConnectorSettings) -> None:
    async with connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(3)))
    long_ago_s = time.time() - 7200
    for path in files(settings):
        os.utime(path, (long_ago_s, long_ago_s))
    foreign = files(settings)[0].parent / "README"
    foreign.write_text("somebody's notes")
    os.utime(foreign, (long_ago_s, long_ago_s))
    async with asyncio.timeout(DEADLINE_S), connect():
        await until(lambda: files(settings) == [foreign])


async def test_a_mount_that_is_gone_is_not_filled_from_below(connect: Connect, settings: ConnectorSettings) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys = random_keys(2)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        away = settings.path + "-away"
        os.rename(settings.path, away)
        with pytest.raises(KVTransferError):
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(2)))
        assert listing(settings) == []
        assert await fetch(pair, keys) == (0, 1)
        os.rename(away, settings.path)
        await asyncio.sleep(0.3)
        assert await fetch(pair, keys) == ()
