"""Folders that several nodes share."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.kv_connector.base import StoreKey
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import Connect, pairs_of
from tests.unit.kv_connector.store_tools import BACK_OFF_S

DEADLINE_S = 60.0


@pytest.fixture
def settings(tmp_path: Path) -> ConnectorSettings:
    """Patient, where a test does not want it otherwise: how busy this machine is decides nothing."""
    return ConnectorSettings(
        name="shared_storage",
        path=str(tmp_path / "store"),
        store_backoff_s=BACK_OFF_S,
        fetch_timeout_base_s=60.0,
        lookup_timeout_s=60.0,
    )


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


def file_of(settings: ConnectorSettings, name: StoreKey) -> Path:
    return Path(settings.path) / "blocks" / name


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
