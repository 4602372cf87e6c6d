"""Disaggregated beside colocated: the points as a table and as curves, and where the one loses to the other."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.lab.page import as_page
from kvasir.bench.markdown import table
from kvasir.bench.timeline import percentile

COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
LEVELS = (2, 5)  # times the unloaded latencies of the colocated node
_COLOURS = {COLOCATED: "#4c78a8", DISAGGREGATED: "#e45756"}
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Medians over requests that came one at a time."""

    setup: str
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """One set-up at one rate."""

    setup: str
    rate: float  # requests a second, offered
    itl_p50_s: float
    itl_p99_s: float
    requests: list[tuple[float, float]]  # TTFT and TPOT of each, in seconds

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Point":
        return cls(**{**data, "requests": [(ttft_s, tpot_s) for ttft_s, tpot_s in data["requests"]]})

    def ttft_s(self, percent: float) -> float:
        return percentile([ttft_s for ttft_s, _ in self.requests], percent)

    def goodput_rps(self, ttft_s: float, tpot_s: float) -> float:
        """Of what was offered, what met both limits."""
        met = sum(ttft <= ttft_s and tpot <= tpot_s for ttft, tpot in self.requests)
        return self.rate * met / len(self.requests)

    def line(self) -> str:
        return f"{self.setup} at {self.rate:g}/s: ITL p99 {_MS * self.itl_p99_s:.0f} ms, TTFT {self.ttft_s(50):.2f} s"


def limits_s(unloaded: Sequence[Unloaded], level: float) -> tuple[float, float]:
    """TTFT and TPOT that a service level allows: of the quietest round, for what disturbs only adds."""
    ttft_s, tpot_s = _quietest(unloaded, COLOCATED)
    return level * ttft_s, level * tpot_s


def _quietest(unloaded: Sequence[Unloaded], setup: str) -> tuple[float, float]:
    """TTFT and TPOT, the least of the rounds."""
    own = [one for one in unloaded if one.setup == setup]
    return min(one.ttft_s for one in own), min(one.tpot_s for one in own)


def _by_rate(points: Sequence[Point], setup: str, value: Callable[[Point], float]) -> dict[float, float]:
    """The median over the rounds."""
    rates = sorted({point.rate for point in points if point.setup == setup})
    return {
        rate: statistics.median(value(point) for point in points if (point.setup, point.rate) == (setup, rate))
        for rate in rates
    }


def measures(unloaded: Sequence[Unloaded]) -> dict[str, Callable[[Point], float]]:
    """What is compared, by the heading of its column. All but goodput: less is better."""

    def goodput(level: float) -> Callable[[Point], float]:
        return lambda point: point.goodput_rps(*limits_s(unloaded, level))

    return {
        "ITL p50 ms": lambda point: _MS * point.itl_p50_s,
        "ITL p99 ms": lambda point: _MS * point.itl_p99_s,
        "TTFT p50 ms": lambda point: _MS * point.ttft_s(50),
        "TTFT p99 ms": lambda point: _MS * point.ttft_s(99),
        **{f"goodput/s at {level}x": goodput(level) for level in LEVELS},
    }


def as_markdown(
    about: Mapping[str, Any], shape: Mapping[str, int], unloaded: Sequence[Unloaded], points: Sequence[Point]
) -> str:
    columns = measures(unloaded)
    curves = {(name, setup): _by_rate(points, setup, value) for name, value in columns.items() for setup in _COLOURS}
    rounds = len(points) // max(1, len({(point.setup, point.rate) for point in points}))
    lines = [
        "colocated: one decode node that also computes the prompts, on all cores. disaggregated: a prefill node and a",
        f"decode node, each on half of them, connector tcp. The built-in model, {shape['input_len']} tokens in and",
        f"{shape['output_len']} out, Poisson arrivals of one seed; router and client run on the same cores.",
        f"Medians of {rounds} round(s). A request counts as good if TTFT and TPOT are at most 2 (5) times those of the",
        "colocated node without load:",
        "",
    ]
    quietest = {setup: _quietest(unloaded, setup) for setup in _COLOURS}
    rows = [[setup, f"{_MS * ttft_s:.0f}", f"{_MS * tpot_s:.1f}"] for setup, (ttft_s, tpot_s) in quietest.items()]
    lines += [*table("one request at a time | TTFT ms | TPOT ms", rows), "", "![curves](disaggregation.png)", ""]
    rows = []
    for rate in sorted({point.rate for point in points}):
        for setup in _COLOURS:
            values = {name: curves[name, setup].get(rate) for name in columns}
            rows.append([f"{rate:g}", setup, *(_cell(name, value) for name, value in values.items())])
    lines += table(" | ".join(["requests/s", "set-up", *columns]), rows, num_texts=2)
    title = "Disaggregated against colocated, on the same cores"
    return as_page(title, about, [*lines, "", *verdict(columns, curves)])


def _cell(column: str, value: float | None) -> str:
    return "" if value is None else f"{value:.{2 if column.startswith('goodput') else 0}f}"


def verdict(columns: Iterable[str], curves: Mapping[tuple[str, str], Mapping[float, float]]) -> list[str]:
    """Where disaggregation wins and loses, by more than 5 %."""
    lines = []
    for name in columns:
        sign = 1 if name.startswith("goodput") else -1
        won: list[str] = []
        lost: list[str] = []
        for rate, here in curves[name, DISAGGREGATED].items():
            there = curves[name, COLOCATED].get(rate)
            if there is None or abs(here - there) <= 0.05 * max(here, there):
                continue
            (won if sign * (here - there) > 0 else lost).append(f"{rate:g}")
        lines.append(f"- {name}: disaggregation wins at {_list(won)}, **loses at {_list(lost)}** requests/s.")
    return lines


def _list(rates: Sequence[str]) -> str:
    return ", ".join(rates) or "no"


def draw(path: Path, unloaded: Sequence[Unloaded], points: Sequence[Point]) -> None:
    from matplotlib.figure import Figure  # late: slow to import, and only this needs it

    figure = Figure(figsize=(11, 7), layout="constrained")
    shown = {name: value for name, value in measures(unloaded).items() if name not in ("ITL p50 ms", "TTFT p50 ms")}
    for axes, (name, value) in zip(figure.subplots(2, 2).flat, shown.items(), strict=True):
        for setup, colour in _COLOURS.items():
            curve = _by_rate(points, setup, value)
            axes.plot(list(curve), list(curve.values()), marker="o", color=colour, label=setup)
        axes.set_xlabel("requests/s offered")
        axes.set_title(name, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
