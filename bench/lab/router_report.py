"""What was measured of routers, as JSON and as a page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvasir.bench.lab.page import as_page, write_page
from kvasir.bench.markdown import spread, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one contender in one round. `tokens_per_core_s` of no router and delays of no token are None."""

    contender: str
    tokens_per_s: float
    cores: float  # CPU time of the router over time
    tokens_per_core_s: float | None
    tokens_per_event: float
    delay_p50_ms: float | None
    delay_p99_ms: float | None
    machine_busy: float  # share of the time of all CPUs in which anything ran, this included


Sections = dict[str, list[Result]]  # by the rate, in words


def read_results(folder: Path) -> Sections:
    """What has been written there before."""
    path = folder / "router.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    known.pop("machine", None)
    return {title: [Result(**one) for one in results] for title, results in known.items()}


def write_results(folder: Path, about: Mapping[str, Any], explanation: str, sections: Sections) -> None:
    sections = dict(sorted(sections.items(), key=lambda one: (len(one[0]), one[0])))  # by rate
    everything = {"machine": about} | {title: [asdict(one) for one in results] for title, results in sections.items()}
    write_page(folder, "router.md", as_markdown(about, explanation, sections))
    (folder / "router.json").write_text(json.dumps(everything, indent=2) + "\n")


def as_markdown(about: Mapping[str, Any], explanation: str, sections: Sections) -> str:
    lines = [explanation]
    columns = [column.name for column in fields(Result) if column.name != "contender"]
    for title, results in sections.items():
        rows = []
        for name in dict.fromkeys(one.contender for one in results):
            own = [one for one in results if one.contender == name]
            rows.append([name, len(own), *(_cell([getattr(one, column) for one in own]) for column in columns)])
        header = " | ".join(["", "rounds", *columns])
        lines += ["", f"## {title}: medians over the rounds (least to most)", "", *table(header, rows)]
    return as_page("The router alone", about, lines)


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return spread(known, 0 if max(known) > 1000 else 2) if len(known) == len(values) else "-"
