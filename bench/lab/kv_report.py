"""What was measured, as numbers and as a table."""

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Movement:
    """All blocks once: into the store (nothing, between peers), and from there to their place."""

    write_s: float
    read_s: float
    cpu_s: float  # of both processes; a store's own server is not in it

    @property
    def s(self) -> float:
        return self.write_s + self.read_s


@dataclass(frozen=True, slots=True)
class Result:
    """Of one case and size. `movements`: one a round for each contender; `kinds`: ours, plain or other."""

    case: str
    size: str
    num_bytes: int
    target: float
    kinds: dict[str, str]
    movements: dict[str, list[Movement]]

    def median_s(self, name: str) -> float:
        return statistics.median(movement.s for movement in self.movements[name])

    @property
    def baseline(self) -> str:
        """The fastest plain way of this run."""
        return min((name for name, kind in self.kinds.items() if kind == "plain"), key=self.median_s)

    def ratio(self, name: str) -> float:
        """How fast beside the baseline: the median of the rounds' own ratios; above 1 is faster."""
        pairs = zip(self.movements[self.baseline], self.movements[name], strict=True)
        return statistics.median(plain.s / other.s for plain, other in pairs)


class Quiet:
    """How busy the machine was with other things: looked at between rounds, while all of ours is idle."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def look(self) -> None:
        before = _cpu_ticks()
        time.sleep(_LOOK_S)
        busy, idle = (after - then for after, then in zip(_cpu_ticks(), before, strict=True))
        self.shares.append(busy / max(busy + idle, 1))

    def __str__(self) -> str:
        if not self.shares:
            return "not looked at"
        return f"{statistics.median(self.shares):.0%} (median), {max(self.shares):.0%} (most)"


def _cpu_ticks() -> tuple[int, int]:
    """Busy and idle, of all cores."""
    fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, idle


def write_results(folder: Path, results: Sequence[Result], quiet: Quiet, num_rounds: int, extra: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = machine() | {"rounds": num_rounds, "busy_with_other_things": str(quiet)}
    everything: dict[str, Any] = {"machine": about, "results": [asdict(result) for result in results]}
    (folder / "kv.json").write_text(json.dumps(everything, indent=1) + "\n")
    text = as_markdown(about, results, extra)
    (folder / "kv.md").write_text(text)
    print(text)


def machine() -> dict[str, Any]:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_end": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def as_markdown(about: dict[str, Any], results: Sequence[Result], extra: Sequence[str]) -> str:
    lines = ["# Moving KV blocks between two processes", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""]
    if not results:
        return "\n".join([*lines, *extra])
    lines += [
        "Medians over the rounds, contenders taking turns, 64 MiB each time. Ours includes header, checksum on both",
        "sides and the copy into the cache; a plain way copies into memory that has been touched. The ratio is that",
        "of the rounds to the fastest plain way (median): above 1 is faster. Stores: written by one, read by another.",
        "",
        "| case | contender | ms | of it written | least | most | GB/s | CPU ms | ratio | wanted |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        for name, kind in result.kinds.items():
            movements = result.movements[name]
            times_s = sorted(movement.s for movement in movements)
            written_ms = statistics.median(movement.write_s for movement in movements) * 1e3
            cells = [
                f"{result.case}, {result.size}",
                f"**{name}**" if kind == "ours" else name,
                *(f"{ms:.1f}" for ms in (result.median_s(name) * 1e3, written_ms, times_s[0] * 1e3, times_s[-1] * 1e3)),
                f"{result.num_bytes / result.median_s(name) / 1e9:.2f}",
                f"{statistics.median(movement.cpu_s for movement in movements) * 1e3:.0f}",
                f"{result.ratio(name):.2f}",
                f"{result.target:.1f}" if kind == "ours" else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *extra, ""])
