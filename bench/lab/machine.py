"""The machine that something was measured on, and how busy it was."""

import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

_LOOK_S = 0.2
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def let_threads_sleep() -> None:
    """While they wait: those that spin slow down whoever's turn comes next. To be called before torch is imported."""
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def about_machine() -> dict[str, Any]:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_end": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def cpu_times_s() -> tuple[float, float]:
    """Busy and idle, of all CPUs together, since they were started."""
    fields = [int(field) / _TICKS_PER_S for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    idle_s = fields[3] + fields[4]
    return sum(fields) - idle_s, idle_s


def busy_share_since(before_s: tuple[float, float]) -> float:
    """Of all CPUs' time since `cpu_times_s` gave that."""
    busy_s, idle_s = (after - then for after, then in zip(cpu_times_s(), before_s, strict=True))
    return busy_s / (busy_s + idle_s) if busy_s + idle_s else 0.0


def process_cpu_s(pid: int) -> float:
    """Of a process with all its threads, what it has waited for of its children, and those that run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
    children = " ".join((task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir())
    return own_s + sum(process_cpu_s(int(child)) for child in children.split())


class Quiet:
    """How busy the machine was with other things: looked at between rounds, while all of ours is idle."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def look(self) -> None:
        before_s = cpu_times_s()
        time.sleep(_LOOK_S)
        self.shares.append(busy_share_since(before_s))

    def __str__(self) -> str:
        if not self.shares:
            return "not looked at"
        return f"{statistics.median(self.shares):.0%} (median), {max(self.shares):.0%} (most)"

    def about_machine(self, **more: object) -> dict[str, Any]:
        return about_machine() | more | {"busy_with_other_things": str(self)}
