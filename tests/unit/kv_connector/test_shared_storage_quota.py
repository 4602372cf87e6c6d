"""The quota of the shared folder: the longest unused go, whoever wrote them, and nobody waits for anybody."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.header import store_key
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage import SharedStorageConnector
from kvasir.kv_connector.shared_storage_files import BlockFolder
from kvasir.kv_connector.shared_storage_quota import Quota
from kvasir.kv_connector.testing import LARGE, SMALL, pairs_of, random_keys
from tests.unit.kv_connector.store_tools import fetch

DEADLINE_S = 60.0
PAYLOAD = memoryview(bytes(range(256)) * 32)  # 8 KiB; with its header 12 on the disk
FILE_BYTES = PAYLOAD.nbytes + 4096


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    own = BlockFolder(tmp_path / "blocks", ttl_s=3600.0)
    own.prepare()
    return own


def random_name() -> StoreKey:
    return store_key(random_keys(1)[0], SMALL)


def write(folder: BlockFolder, quota: Quota, age_s: float = 0.0) -> StoreKey:
    name = random_name()
    folder.write(name, Frame(b"header", PAYLOAD), quota.make_room(FILE_BYTES))
    if age_s:
        set_age(folder, name, age_s)
    return name


def set_age(folder: BlockFolder, name: StoreKey, age_s: float) -> None:
    used_s = time.time() - age_s
    os.utime(folder.path / name[:2] / name, (used_s, used_s))


def used_bytes(folder: BlockFolder) -> int:
    return sum(file.num_bytes for file in folder.found())


def test_the_longest_unused_go(folder: BlockFolder) -> None:
    quota = Quota(folder, 10 * FILE_BYTES)
    names = [write(folder, quota, age_s=1000 - index) for index in range(10)]
    place = memoryview(bytearray(FILE_BYTES))
    assert folder.read(names[0], place) == FILE_BYTES  # so it is not the longest unused any more
    assert folder.has(names[2])
    written = [write(folder, quota) for _ in range(3)]
    assert [folder.has(name) for name in names] == [True, False, True, False, False] + [True] * 5
    assert all(folder.has(name) for name in written)
    assert used_bytes(folder) == 10 * FILE_BYTES


def test_a_block_written_over_another_is_whole_and_of_its_own_size(folder: BlockFolder) -> None:
    quota = Quota(folder, 4 * FILE_BYTES)
    old = [write(folder, quota, age_s=100 - index) for index in range(4)]
    inode = os.stat(folder.path / old[0][:2] / old[0]).st_ino
    name, payload = random_name(), memoryview(b"\x07" * 1000)
    folder.write(name, Frame(b"another header", payload), quota.make_room(FILE_BYTES))
    status = os.stat(folder.path / name[:2] / name)
    assert status.st_ino == inode
    assert status.st_size == 4096 + 1000
    assert status.st_mode & 0o777 == 0o600
    place = memoryview(bytearray(FILE_BYTES))
    assert folder.read(name, place) == 4096 + 1000
    assert place[4096:5096] == payload
    assert not folder.has(old[0])


def test_a_file_with_a_second_name_is_not_written_over(folder: BlockFolder) -> None:
    quota = Quota(folder, FILE_BYTES)
    old = write(folder, quota, age_s=100)
    backup = folder.path.parent / "backup"
    os.link(folder.path / old[:2] / old, backup)
    before = backup.read_bytes()
    write(folder, quota)
    assert backup.read_bytes() == before
    assert not folder.has(old)
    assert used_bytes(folder) == FILE_BYTES


def test_somebody_else_was_faster(folder: BlockFolder) -> None:
    """What another process has removed since we looked is not missed: its own block has taken that one's place."""
    quota, other = Quota(folder, 20 * FILE_BYTES), Quota(folder, 20 * FILE_BYTES)
    names = [write(folder, quota, age_s=1000 - index) for index in range(20)]
    quota.look()
    folder.remove(names[0])
    other.look()
    for _ in range(20):
        write(folder, quota)
        write(folder, other)
        assert used_bytes(folder) <= (20 + 2 * 2) * FILE_BYTES


def test_what_a_dead_writer_left_goes_and_others_files_stay(folder: BlockFolder) -> None:
    quota = Quota(folder, None)
    name = write(folder, quota)
    subfolder = folder.path / name[:2]
    left, fresh = (subfolder / f"{name[:2]}.{digit * 32}.tmp" for digit in "ab")
    foreign = [subfolder / "README", folder.path / "notes", subfolder / f"{name[:2]}x", subfolder / ("0" * 64)]
    for path in (left, fresh, *foreign):
        path.write_text("something")
    for path in (left, *foreign):
        os.utime(path, (1e9, 1e9))
    (folder.path / "zz").mkdir()
    (subfolder / random_name().replace(random_name()[:2], name[:2], 1)).mkdir()
    quota.look()
    assert not left.exists()
    assert fresh.exists()
    assert all(path.exists() for path in foreign)
    assert folder.has(name)


def test_what_is_over_its_time_goes(folder: BlockFolder) -> None:
    quota = Quota(folder, None)
    old, future, young = (write(folder, quota, age_s=age_s) for age_s in (3601, -3700, 3000))
    place = memoryview(bytearray(FILE_BYTES))
    assert not folder.has(old)
    assert folder.read(old, place) is None
    assert folder.read(future, place) is None
    quota.look()
    assert [file.name for file in folder.found()] == [young]


def test_half_of_what_is_free_is_the_default(folder: BlockFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "free_bytes", lambda: 20 * FILE_BYTES - used_bytes(folder))
    quota = Quota(folder, None)
    for index in range(20):
        write(folder, quota, age_s=1000 - index)
    assert used_bytes(folder) == 10 * FILE_BYTES
    another = Quota(folder, None)
    another.look()
    write(folder, another)
    assert used_bytes(folder) == 10 * FILE_BYTES


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
        assert used_bytes(BlockFolder(tmp_path / "blocks", 3600.0)) <= (40 + 4) * file_bytes
        assert not pair.receiver.metrics.misses
        assert pair.sender.metrics.store_failures == 0


WRITER = """
import random, sys
from pathlib import Path
from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.shared_storage_files import BlockFolder
from kvasir.kv_connector.shared_storage_quota import Quota

folder, seed, quota_bytes = BlockFolder(Path(sys.argv[1]), 3600.0), int(sys.argv[2]), int(sys.argv[3])
rng, quota = random.Random(seed), Quota(folder, quota_bytes)
print("ready", flush=True)
for _ in range(int(sys.argv[4])):
    payload = rng.randbytes(1) * 8192
    name = f"{rng.randbytes(32).hex()}-exact-float32-0-1"
    folder.write(name, Frame(b"header" + payload[:1], memoryview(payload)), quota.make_room(12288))
"""


def writer(folder: BlockFolder, seed: int, quota_bytes: int, num_blocks: int) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}
    arguments = [str(folder.path), str(seed), str(quota_bytes), str(num_blocks)]
    command = [sys.executable, "-c", WRITER, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_several_processes_write_and_some_are_killed(folder: BlockFolder) -> None:
    """Whatever is found is whole, the quota holds, and what the dead left goes."""
    rng, quota_bytes = random.Random(4), 200 * FILE_BYTES
    killed = [writer(folder, seed, quota_bytes, 10**9) for seed in range(2)]
    survivor = writer(folder, 9, quota_bytes, 500)
    place, num_read = memoryview(bytearray(FILE_BYTES)), 0
    try:
        for process in (*killed, survivor):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
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
        os.utime(folder.path / name[:2] / name, (1e9, 1e9))
    Quota(folder, quota_bytes).look()
    assert all(file.is_block for file in folder.found())
    assert 0 < used_bytes(folder) <= quota_bytes * (1 + 2 / 16 * 4)
    for file in folder.found():
        assert folder.read(StoreKey(file.name), place) == FILE_BYTES
        assert place[4096:] == bytes(place[10:11]) * 8192
