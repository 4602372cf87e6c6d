"""What a process may use of its machine, read from files as a kernel writes them."""

from pathlib import Path

import pytest

from kvasir.common.machine import available_memory_bytes, usable_cpus


@pytest.mark.parametrize(
    ("files", "num_cpus"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_containers_quota_counts(tmp_path: Path, files: dict[str, str], num_cpus: int | None) -> None:
    write(tmp_path, files)
    everything = usable_cpus(tmp_path / "absent")
    assert usable_cpus(tmp_path) == everything[:num_cpus]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 800 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, 800 * 1024),
        ({"memory.max": "5000", "memory.current": "2000"}, 3000),
        ({"memory.max": "5000", "memory.current": "6000"}, 0),
        ({"memory/memory.limit_in_bytes": "7000", "memory/memory.usage_in_bytes": "3000"}, 4000),
        ({"memory/memory.limit_in_bytes": str(1 << 62), "memory/memory.usage_in_bytes": "3000"}, 800 * 1024),
    ],
)
def test_a_containers_memory_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    write(tmp_path, {"meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB\n", **files})
    assert available_memory_bytes(tmp_path, tmp_path / "meminfo") == expected


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
