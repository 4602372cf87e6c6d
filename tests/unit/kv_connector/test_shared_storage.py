"""The shared folder when files are torn, foreign or late, the disk is full, or a writer dies."""

import asyncio
import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.header import store_key
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage import SharedStorageConnector
from kvasir.kv_connector.testing import LARGE, SMALL, Connect, Pair, open_node, pairs_of, random_keys, until
from tests.unit.kv_connector.store_tools import fetch, layout_of

DEADLINE_S = 40.0


@pytest.fixture
def settings(tmp_path: Path) -> ConnectorSettings:
    return ConnectorSettings(name="shared_storage", path=str(tmp_path / "store"), store_backoff_s=0.2)


@pytest.fixture
def connect(settings: ConnectorSettings) -> Connect:
    return pairs_of(settings)


def files(settings: ConnectorSettings) -> list[Path]:
    return sorted(path for path in Path(settings.path).rglob("*") if path.is_file())


def everything_in(folder: Path) -> list[Path]:
    """Links, pipes and all."""
    return list(folder.rglob("*"))


def listing(settings: ConnectorSettings) -> list[Path]:
    return everything_in(Path(settings.path))


def left_aside(settings: ConnectorSettings) -> list[Path]:
    return [path for path in listing(settings) if path.suffix == ".tmp"]


def remount_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def file_of(settings: ConnectorSettings, name: StoreKey) -> Path:
    return Path(settings.path) / "blocks" / name


async def test_files_are_for_their_owner_only(connect: Connect, settings: ConnectorSettings) -> None:
    async with connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(3)))
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(settings)] == [0o600] * 3
    assert stat.S_IMODE((Path(settings.path) / "blocks").stat().st_mode) == 0o700


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
        await asyncio.sleep(0.3)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ESTALE, {MissReason.ABSENT: 1}),  # removed by another machine
        (errno.EACCES, {MissReason.HEADER: 2}),  # another user's
        (errno.EIO, {MissReason.STORE_DOWN: 3}),  # the disk's: no other is tried
    ],
)
async def test_a_file_that_cannot_be_opened(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, error: int, reason: dict[MissReason, int]
) -> None:
    real_open, keys = os.open, random_keys(3)
    name = store_key(keys[2], SMALL)

    def open_but_one(path: str, *args: int, **more: int) -> int:
        if path == name:
            raise OSError(error, os.strerror(error), path)
        return real_open(path, *args, **more)

    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        monkeypatch.setattr(os, "open", open_but_one)
        assert await fetch(pair, keys) == ((0, 1, 2) if error == errno.EIO else (2,))
        assert pair.receiver.metrics.misses == reason
        assert pair.receiver.metrics.store_failures == (error == errno.EIO)


def write_and_be_killed(settings: ConnectorSettings) -> None:
    code = f"""
import asyncio, os, signal
from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.kv_connector.store_tools import fetch, layout_of
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


async def test_a_wider_folder_is_closed_and_anothers_is_refused(tmp_path: Path, settings: ConnectorSettings) -> None:
    folder = Path(settings.path) / "blocks"
    folder.mkdir(parents=True, mode=0o755)
    async with pairs_of(settings)():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rename(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="no folder, or a link"):
        await SharedStorageConnector(settings).open(None, 1000)  # type: ignore[arg-type]
    folder.unlink()
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        with pytest.raises(ValueError, match="belongs to user 12345, and this is user 0"):
            await SharedStorageConnector(settings).open(None, 1000)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["link", "file", "another user's"])
async def test_a_folder_that_has_become_somebody_elses_is_left_alone(
    connect: Connect, settings: ConnectorSettings, tmp_path: Path, kind: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), connect() as pair:
        keys = random_keys(1)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        folder, elsewhere = Path(settings.path) / "blocks", tmp_path / "elsewhere"
        folder.rename(elsewhere)
        if kind == "link":
            folder.symlink_to(elsewhere)
        elif kind == "file":
            folder.write_text("no folder")
        elif os.geteuid() == 0:
            elsewhere.rename(folder)
            os.chown(folder, 12345, -1)
        else:
            pytest.skip("only root can give a folder away")
        assert await pair.receiver.receiver.lookup(keys) == 0
        assert await fetch(pair, keys) == (0,)
        with pytest.raises(KVTransferError):
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))
        assert (pair.receiver.metrics.store_failures, pair.sender.metrics.store_failures) == (1, 1)
        assert [path.name for path in everything_in(tmp_path) if "-exact-" in path.name] == [store_key(keys[0], SMALL)]


async def test_a_disk_that_is_full_costs_a_line_and_works_again_when_there_is_room(
    settings: ConnectorSettings, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    layout = layout_of(1)
    on_small = replace(settings, path=str(small_disk), kv_quota_bytes=1 << 30)
    async with asyncio.timeout(DEADLINE_S), pairs_of(on_small)(layout, num_blocks=8) as pair:
        keys, others = random_keys(2), random_keys(8)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        with pytest.raises(KVTransferError, match="No space left"):
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(others))
        assert pair.sender.metrics.store_failures == 1
        assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
        assert await fetch(pair, keys) == ()
        assert not left_aside(on_small)
        for path in files(on_small):
            path.unlink()
        await asyncio.sleep(0.3)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


async def test_a_mount_that_has_gone_leaves_the_disk_below_it_alone(
    settings: ConnectorSettings, small_disk: Path
) -> None:
    """Its mount point is still there; once it is mounted again, it is used again."""
    on_small = replace(settings, path=str(small_disk))
    keys = random_keys(2)
    async with asyncio.timeout(DEADLINE_S), pairs_of(on_small)() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        away = small_disk.parent / "away"
        await asyncio.to_thread(move_mount, small_disk, away)
        with pytest.raises(KVTransferError, match="No such file or directory"):
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(2)))
        assert await fetch(pair, keys) == (0, 1)
        assert listing(on_small) == []
        await asyncio.to_thread(move_mount, away, small_disk)
        await asyncio.sleep(0.3)
        assert await fetch(pair, keys) == ()
        for path in files(on_small):
            path.unlink()
        (small_disk / "blocks").rmdir()  # by somebody who wants an empty store
        await asyncio.sleep(0.3)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()


def move_mount(old: Path, new: Path) -> None:
    new.mkdir(exist_ok=True)
    subprocess.run(["mount", "--move", str(old), str(new)], check=True)


async def test_a_read_only_mount_is_read(settings: ConnectorSettings, small_disk: Path) -> None:
    on_small = replace(settings, path=str(small_disk))
    keys = random_keys(3)
    async with asyncio.timeout(DEADLINE_S), pairs_of(on_small)() as pair:
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
    remount_read_only(small_disk)
    async with asyncio.timeout(DEADLINE_S), pairs_of(on_small)() as pair:
        with pytest.raises(KVTransferError, match="Read-only file system"):
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))
        assert pair.sender.metrics.store_failures == 1
        assert await pair.receiver.receiver.lookup(keys) == 3
        result = await pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block).done()
        assert result.missing == ()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounting.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {mounting.stderr.decode().strip()}")
    yield disk
    for mounted in (disk, tmp_path / "away"):
        if mounted.is_mount():
            subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.mark.parametrize("num_mib", [1, 40, 70])
async def test_blocks_of_any_size(connect: Connect, settings: ConnectorSettings, num_mib: int) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(layout_of(num_mib), num_blocks=1) as pair:
        keys = random_keys(1)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        assert await fetch(pair, keys) == ()
        assert not pair.receiver.metrics.misses


@pytest.mark.parametrize("num_mib", [1, 8])
async def test_a_put_that_was_cancelled_reads_no_more(connect: Connect, num_mib: int) -> None:
    """What is written to the blocks afterwards does not get into the store, and no half of a block is found there."""
    async with asyncio.timeout(DEADLINE_S), connect(layout_of(num_mib), num_blocks=1) as pair:
        connector, payload = pair.sender.connector, memoryview(bytearray(num_mib << 20))
        assert isinstance(connector, SharedStorageConnector)
        names = [store_key(key, SMALL) for key in random_keys(20)]
        for step, name in enumerate(names):
            payload[:] = bytes([step + 1]) * payload.nbytes
            task = asyncio.create_task(connector.put([(name, Frame(b"a header", payload))]))
            await asyncio.sleep(step * num_mib * 5e-5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            payload[:] = bytes(payload.nbytes)
        async for name, frame in connector.fetch(names):
            if frame is not None:
                assert frame.payload == bytes([names.index(name) + 1]) * payload.nbytes


async def test_a_file_system_that_hangs_keeps_nobody(
    connect: Connect, settings: ConnectorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system does when its server is away: calls do not return, and cannot be interrupted."""
    goes_on = threading.Event()
    real_readv = os.readv

    def hang(descriptor: int, parts: list[memoryview]) -> int:
        goes_on.wait(DEADLINE_S)
        return real_readv(descriptor, parts)

    async with asyncio.timeout(DEADLINE_S), connect(fetch_timeout_base_s=0.3) as pair:
        keys = random_keys(4)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        with monkeypatch.context() as patch:
            patch.setattr(os, "readv", hang)
            assert await fetch(pair, keys) == (0, 1, 2, 3)
            assert pair.receiver.metrics.misses == {MissReason.TIMEOUT: 4}
            assert pair.receiver.metrics.store_failures == 1
            assert not pair.receiver.memory.writes
        goes_on.set()  # too late: the blocks may be somebody else's by now
        await asyncio.sleep(0.3)
        assert not pair.receiver.memory.writes
        assert await fetch(pair, keys) == ()
