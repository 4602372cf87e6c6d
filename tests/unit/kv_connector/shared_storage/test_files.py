"""What lies in the shared folder: for its owner only, named by hashes, never half a block."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage.connector import SharedStorageConnector
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import LARGE, SMALL, Connect, Pair, open_node, random_keys, until
from tests.unit.kv_connector.shared_storage.conftest import (
    DEADLINE_S,
    files,
)
from tests.unit.kv_connector.store_tools import fetch, layout_of


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
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=240)
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
