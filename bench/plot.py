"""The distributions of a benchmark as a picture."""

import statistics
from pathlib import Path

from kvasir.bench.load_generator import LoadResult
from kvasir.bench.report import METRICS, samples_s
from kvasir.bench.timeline import percentile

_PANELS = ("ttft", "tpot", "itl", "e2el")


def plot_distributions(load: LoadResult, path: Path, title: str) -> None:
    """One histogram each of TTFT, TPOT, ITL and E2EL, with median and p99 marked."""
    from matplotlib.figure import Figure  # late: slow to import, and only this needs it

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axes, metric in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        values_ms = [value * 1e3 for value in samples_s(load, metric)]
        axes.set_title(METRICS[metric][1], fontsize=10)
        axes.set_xlabel(f"{METRICS[metric][0]} (ms)")
        axes.set_ylabel("count")
        if not values_ms:
            axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
            continue
        axes.hist(values_ms, bins=min(60, max(5, len(values_ms) // 2)), color="#4c78a8")
        median, p99 = statistics.median(values_ms), percentile(values_ms, 99)
        axes.axvline(median, color="black", linewidth=1, label=f"median {median:.1f} ms")
        axes.axvline(p99, color="#e45756", linewidth=1, linestyle="--", label=f"p99 {p99:.1f} ms")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
