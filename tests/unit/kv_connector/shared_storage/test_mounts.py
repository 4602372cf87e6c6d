"""The folder itself: gone, somebody else's, full, or read-only."""

import asyncio
import logging
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.shared_storage.connector import SharedStorageConnector
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import SMALL, Connect, pairs_of, random_keys
from tests.unit.kv_connector.shared_storage.conftest import (
    DEADLINE_S,
    everything_in,
    files,
    left_aside,
    listing,
)
from tests.unit.kv_connector.store_tools import end_back_off, fetch, layout_of


def remount_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


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
        end_back_off(pair)
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
        end_back_off(pair)
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
        end_back_off(pair)
        assert await fetch(pair, keys) == ()
        for path in files(on_small):
            path.unlink()
        (small_disk / "blocks").rmdir()  # by somebody who wants an empty store
        end_back_off(pair)
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
