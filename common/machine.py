"""What of the machine is this process's: its cores and its memory, by the limits of its container too."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(root: Path = _CGROUP) -> list[int]:
    """The cores that this process may use, by affinity and by its container's quota."""
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota(root)
    return cpus if quota is None else cpus[: max(1, math.floor(quota))]


def _cpu_quota(root: Path) -> float | None:
    """In cores. cgroup v2 keeps "quota period" in one file, v1 in two."""
    if text := _read(root / "cpu.max"):
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us) > 0:
        return int(quota_us) / int(period_us)
    return None


def available_memory_bytes(root: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """What can be used without swapping: of the machine's, and of the container's limit."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    limits = ("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit_file, usage_file in limits:
        limit, usage = _read(root / limit_file), _read(root / usage_file)
        if limit and usage and limit != "max":
            available = min(available, int(limit) - int(usage))
    return max(0, available)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
