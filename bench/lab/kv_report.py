"""What was measured, as numbers and as a table. Each run measures what it is asked to; what others found stays."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench.lab.page import keep, kept
from kvasir.bench.lab.rounds import median_ratio
from kvasir.bench.markdown import facts, table


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
    about: dict[str, Any] = field(default_factory=dict)  # the machine, and how busy it was

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Result":
        found = {name: [Movement(**one) for one in movements] for name, movements in data["movements"].items()}
        return cls(**{**data, "movements": found})

    def median_s(self, name: str) -> float:
        return statistics.median(movement.s for movement in self.movements[name])

    @property
    def baseline(self) -> str:
        """The fastest plain way of this run."""
        return min((name for name, kind in self.kinds.items() if kind == "plain"), key=self.median_s)

    def ratio(self, name: str) -> float:
        """How fast beside the baseline: the median of the rounds' own ratios; above 1 is faster."""
        plain_s, own_s = ([movement.s for movement in self.movements[one]] for one in (self.baseline, name))
        return median_ratio(plain_s, own_s)


def write_results(folder: Path, results: Sequence[Result], sections: Mapping[str, Sequence[str]]) -> None:
    """sections: what has no contenders, by its name, in lines. Cases and sections of earlier runs are kept."""
    earlier = kept(folder, "kv") or {"results": [], "sections": {}}
    by_name = {(one.case, one.size): one for one in (*map(Result.from_json, earlier["results"]), *results)}
    all_sections = earlier["sections"] | {name: list(lines) for name, lines in sections.items()}
    found = {"results": [asdict(result) for result in by_name.values()], "sections": all_sections}
    keep(folder, "kv", found, as_markdown(list(by_name.values()), all_sections))


def as_markdown(results: Sequence[Result], sections: Mapping[str, Sequence[str]]) -> str:
    lines = [
        "# Moving KV blocks between two processes",
        "",
        "Medians over the rounds, contenders taking turns, 64 MiB each time. Ours (bold) includes header, checksum on",
        "both sides and the copy into the cache; a plain way copies into touched memory, and does no more. The ratio",
        "is that of the rounds to the fastest plain way (median): above 1 is faster. What is neither ours nor plain is",
        "there for comparison. Stores: written by one process, read by another.",
        "",
    ]
    for result in results:
        lines += [f"## {result.case}, blocks of {result.size}", "", facts(result.about), "", *_table(result), ""]
    for section in sections.values():
        lines += [*section, ""]
    return "\n".join(lines)


def _table(result: Result) -> list[str]:
    header = "contender | kind | ms | of it written | least | most | GB/s | CPU ms | ratio | wanted"
    rows = []
    for name, kind in result.kinds.items():
        movements = result.movements[name]
        times_s = sorted(movement.s for movement in movements)
        written_s = statistics.median(movement.write_s for movement in movements)
        row = [
            f"**{name}**" if kind == "ours" else name,
            kind,
            *(f"{1e3 * s:.1f}" for s in (result.median_s(name), written_s, times_s[0], times_s[-1])),
            f"{result.num_bytes / result.median_s(name) / 1e9:.2f}",
            f"{statistics.median(movement.cpu_s for movement in movements) * 1e3:.0f}",
            f"{result.ratio(name):.2f}",
            f"{result.target:.1f}" if kind == "ours" else "",
        ]
        rows.append(row)
    return table(header, rows, num_texts=2)
