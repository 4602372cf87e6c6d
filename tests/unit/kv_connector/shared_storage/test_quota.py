"""The quota of the shared folder: the longest unused go, whoever wrote them, and nobody waits for anybody."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage.connector import SharedStorageConnector
from kvasir.kv_connector.shared_storage.files import OPEN_FLAGS, OpenFolder
from kvasir.kv_connector.shared_storage.folder import BlockFolder
from kvasir.kv_connector.shared_storage.names import new_aside
from kvasir.kv_connector.shared_storage.quota import Quota
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import LARGE, SMALL, pairs_of, random_keys
from tests.unit.kv_connector.store_tools import fetch
from tests.waiting import wait_until

DEADLINE_S = 60.0
PAYLOAD = memoryview(bytes(range(256)) * 32)  # 8 KiB; with its header 12 on the disk
FILE_BYTES = PAYLOAD.nbytes + 4096


@pytest.fixture
def blocks(tmp_path: Path) -> BlockFolder:
    own = BlockFolder(tmp_path / "blocks", ttl_s=3600.0)
    own.prepare()
    return own


@pytest.fixture
def folder(blocks: BlockFolder) -> Iterator[OpenFolder]:
    with blocks.opened() as folder:
        yield folder


def random_name() -> StoreKey:
    return store_key(random_keys(1)[0], SMALL)


def write(blocks: BlockFolder, quota: Quota, age_s: float = 0.0) -> StoreKey:
    name = random_name()
    with blocks.opened() as folder:
        folder.write(name, Frame(b"header", PAYLOAD), quota.make_room(folder, FILE_BYTES))
    if age_s:
        set_age(blocks, name, age_s)
    return name


def set_age(blocks: BlockFolder, name: StoreKey, age_s: float) -> None:
    used_s = time.time() - age_s
    os.utime(blocks.path / name, (used_s, used_s))


def used_bytes(folder: OpenFolder) -> int:
    return sum(file.num_bytes for file in folder.found())


def test_the_longest_unused_go(blocks: BlockFolder, folder: OpenFolder) -> None:
    quota = Quota(blocks, 10 * FILE_BYTES)
    names = [write(blocks, quota, age_s=1000 - index) for index in range(10)]
    place = memoryview(bytearray(FILE_BYTES))
    assert folder.read(names[0], place) == FILE_BYTES  # so it is not the longest unused any more
    assert folder.has(names[2])
    written = [write(blocks, quota) for _ in range(3)]
    assert [folder.has(name) for name in names] == [True, False, True, False, False] + [True] * 5
    assert all(folder.has(name) for name in written)
    assert used_bytes(folder) == 10 * FILE_BYTES


def test_a_block_written_over_another_is_whole_and_of_its_own_size(blocks: BlockFolder, folder: OpenFolder) -> None:
    quota = Quota(blocks, 4 * FILE_BYTES)
    old = [write(blocks, quota, age_s=100 - index) for index in range(4)]
    inode = os.stat(blocks.path / old[0]).st_ino
    name, payload = random_name(), memoryview(b"\x07" * 1000)
    folder.write(name, Frame(b"another header", payload), quota.make_room(folder, FILE_BYTES))
    status = os.stat(blocks.path / name)
    assert status.st_ino == inode
    assert status.st_size == 4096 + 1000
    assert status.st_mode & 0o777 == 0o600
    place = memoryview(bytearray(FILE_BYTES))
    assert folder.read(name, place) == 4096 + 1000
    assert place[4096:5096] == payload
    assert not folder.has(old[0])


def test_a_file_with_a_second_name_is_not_written_over(blocks: BlockFolder, folder: OpenFolder) -> None:
    quota = Quota(blocks, FILE_BYTES)
    old = write(blocks, quota, age_s=100)
    backup = blocks.path.parent / "backup"
    os.link(blocks.path / old, backup)
    before = backup.read_bytes()
    write(blocks, quota)
    assert backup.read_bytes() == before
    assert not folder.has(old)
    assert used_bytes(folder) == FILE_BYTES


@pytest.mark.parametrize("error", [errno.EPERM, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["utime", "open"])
def test_a_block_that_cannot_be_written_over_makes_room_all_the_same(
    blocks: BlockFolder, folder: OpenFolder, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """Another user's, of before the folder was given to us; or gone, as NFS tells it."""
    quota = Quota(blocks, FILE_BYTES)
    old, real = write(blocks, quota, age_s=100), getattr(os, call)

    def refuse(path: str, *args: int, **more: int) -> int | None:
        if path == old or (call == "open" and args[0] == os.O_WRONLY | OPEN_FLAGS):
            raise OSError(error, os.strerror(error), path)
        return real(path, *args, **more)  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        new = write(blocks, quota)
    assert [file.name for file in folder.found()] == [new]
    assert folder.read(new, memoryview(bytearray(FILE_BYTES)))
    assert folder.read(old, memoryview(bytearray(FILE_BYTES))) is None


def test_somebody_else_was_faster(blocks: BlockFolder, folder: OpenFolder) -> None:
    """What another process has removed since we looked is not missed: its own block has taken that one's place."""
    quota, other = Quota(blocks, 20 * FILE_BYTES), Quota(blocks, 20 * FILE_BYTES)
    names = [write(blocks, quota, age_s=1000 - index) for index in range(20)]
    quota.look()
    folder.remove(names[0])
    other.look()
    for _ in range(20):
        write(blocks, quota)
        write(blocks, other)
        assert used_bytes(folder) <= (20 + 2 * 2) * FILE_BYTES


def test_what_a_dead_writer_left_goes_and_others_files_stay(blocks: BlockFolder, folder: OpenFolder) -> None:
    quota = Quota(blocks, None)
    name = write(blocks, quota)
    left, fresh = (blocks.path / f"{digit * 32}.7.tmp" for digit in "ab")
    foreign = [blocks.path / other for other in ("README", f"{name[:2]}x", "0" * 64, "00.tmp")]
    for path in (left, fresh, *foreign):
        path.write_text("something")
    for path in (left, *foreign):
        os.utime(path, (1e9, 1e9))
    (blocks.path / random_name()).mkdir()
    quota.look()
    assert not left.exists()
    assert fresh.exists()
    assert all(path.exists() for path in foreign)
    assert folder.has(name)


def test_what_is_over_its_time_goes(blocks: BlockFolder, folder: OpenFolder) -> None:
    quota = Quota(blocks, None)
    old, future, young = (write(blocks, quota, age_s=age_s) for age_s in (3601, -3700, 3000))
    place = memoryview(bytearray(FILE_BYTES))
    assert not folder.has(old)
    assert folder.read(old, place) is None
    assert folder.read(future, place) is None
    quota.look()
    assert [file.name for file in folder.found()] == [young]


def test_half_of_what_is_free_is_the_default(
    blocks: BlockFolder, folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "free_bytes", lambda: 20 * FILE_BYTES - used_bytes(folder))
    quota = Quota(blocks, None)
    for index in range(20):
        write(blocks, quota, age_s=1000 - index)
    assert used_bytes(folder) == 10 * FILE_BYTES
    another = Quota(blocks, None)
    another.look()
    write(blocks, another)
    assert used_bytes(folder) == 10 * FILE_BYTES


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0])
def test_a_machine_whose_clock_is_wrong_removes_nothing(
    blocks: BlockFolder, folder: OpenFolder, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """Files get their times from the file server."""
    name, aside = write(blocks, Quota(blocks, None)), blocks.path / new_aside()
    aside.write_text("being written")
    real_time = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real_time() + ahead_s)
        Quota(blocks, None).look()
        assert aside.exists()
        assert folder.has(name)
        assert folder.read(name, memoryview(bytearray(FILE_BYTES))) == FILE_BYTES
    Quota(blocks, None).look()
    assert folder.has(name)


def test_nobody_waits_for_a_writer_whose_file_system_hangs(
    blocks: BlockFolder, folder: OpenFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = Quota(blocks, FILE_BYTES)
    write(blocks, quota, age_s=100)
    quota.look()
    hangs, goes_on, answers = threading.Event(), threading.Event(), []

    def hang(self: OpenFolder, name: str) -> None:
        hangs.set()
        goes_on.wait(DEADLINE_S)

    monkeypatch.setattr(OpenFolder, "used_s", hang)
    writer = threading.Thread(target=quota.make_room, args=(folder, FILE_BYTES))
    asker = threading.Thread(target=lambda: answers.append(quota.wants_a_look))
    writer.start()
    assert hangs.wait(DEADLINE_S)
    asker.start()
    asker.join(DEADLINE_S / 2)
    goes_on.set()
    writer.join(DEADLINE_S)
    assert answers == [False]


async def test_a_quota_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path), kv_quota_bytes=100_000)
    with pytest.raises(ValueError, match="holds no block"):
        await SharedStorageConnector(settings).open(None, LARGE.bytes_per_block)  # type: ignore[arg-type]


async def test_many_turns_within_a_quota(tmp_path: Path) -> None:
    file_bytes = LARGE.bytes_per_block + 4096
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path), kv_quota_bytes=40 * file_bytes)
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings)(LARGE, num_blocks=20) as pair:
        for _ in range(15):
            keys = random_keys(20)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            assert await fetch(pair, keys) == ()
        with BlockFolder(tmp_path / "blocks", 3600.0).opened() as folder:
            assert used_bytes(folder) <= (40 + 4) * file_bytes
        assert not pair.receiver.metrics.misses
        assert pair.sender.metrics.store_failures == 0


WRITER = """
import random, sys
from pathlib import Path
from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.shared_storage.folder import BlockFolder
from kvasir.kv_connector.shared_storage.quota import Quota

blocks, seed, quota_bytes = BlockFolder(Path(sys.argv[1]), 3600.0), int(sys.argv[2]), int(sys.argv[3])
rng, quota = random.Random(seed), Quota(blocks, quota_bytes)
print("ready", flush=True)
for _ in range(int(sys.argv[4])):
    payload = rng.randbytes(1) * 8192
    name = f"{rng.randbytes(32).hex()}-exact-float32-0-1"
    with blocks.opened() as folder:
        folder.write(name, Frame(b"header" + payload[:1], memoryview(payload)), quota.make_room(folder, 12288))
"""


def writer(blocks: BlockFolder, seed: int, quota_bytes: int, num_blocks: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    arguments = [str(blocks.path), str(seed), str(quota_bytes), str(num_blocks)]
    command = [sys.executable, "-c", WRITER, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_several_processes_write_and_some_are_killed(blocks: BlockFolder, folder: OpenFolder) -> None:
    """Whatever is found is whole, the quota holds, and what the dead left goes."""
    rng, quota_bytes = random.Random(4), 200 * FILE_BYTES
    killed = [writer(blocks, seed, quota_bytes, 10**9) for seed in range(2)]
    survivor = writer(blocks, 9, quota_bytes, 500)
    place, num_read = memoryview(bytearray(FILE_BYTES)), 0
    try:
        for process in (*killed, survivor):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        wait_until(lambda: any(file.is_block for file in folder.found()))
        for process in killed:
            time.sleep(rng.uniform(0.1, 0.3))
            for file in list(folder.found())[:200]:
                assert file.num_bytes <= FILE_BYTES
                if file.is_block and (size := folder.read(StoreKey(file.name), place)):
                    num_read += place[4096:size] == bytes(place[10:11]) * 8192
            process.send_signal(signal.SIGKILL)
        assert survivor.wait(DEADLINE_S) == 0
    finally:
        for process in (*killed, survivor):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    assert num_read > 0
    left = [file.name for file in folder.found() if not file.is_block]
    assert len(left) <= len(killed)
    for name in left:
        os.utime(blocks.path / name, (1e9, 1e9))
    Quota(blocks, quota_bytes).look()
    assert all(file.is_block for file in folder.found())
    assert 0 < used_bytes(folder) <= quota_bytes * (1 + 2 / 16 * 4)
    for file in folder.found():
        assert folder.read(StoreKey(file.name), place) == FILE_BYTES
        assert place[4096:] == bytes(place[10:11]) * 8192
