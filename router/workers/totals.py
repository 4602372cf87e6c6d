"""The metrics of all workers together: counters and histograms of the dead stay in the sums, so that no sum falls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

# What each worker sees of the same nodes, and what is no amount; all other gauges are each worker's own, and add up.
_OF_THE_CLUSTER: dict[str, Callable[[float, float], float]] = {
    "kvasir:nodes": max,
    "kvasir:node_free_blocks": min,
    "kvasir:node_seats_taken": max,
    "kvasir:node_queued_tokens": max,
    "kvasir:prefix_index_blocks": max,
    "process_start_time_seconds": min,
}
_Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels


@dataclass
class _Family:
    kind: str
    help_text: str
    values: dict[_Key, float] = field(default_factory=dict)


class _Sum:
    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, text: str, *, with_gauges: bool = True) -> None:
        for metric in text_string_to_metric_families(text):
            is_gauge = metric.type not in ("counter", "histogram")
            if is_gauge and not with_gauges:
                continue
            merge = _OF_THE_CLUSTER.get(metric.name, float.__add__)
            family = self._families.setdefault(metric.name, _Family(metric.type, metric.documentation))
            for sample in metric.samples:
                key = sample.name, tuple(sample.labels.items())
                known = family.values.get(key)
                family.values[key] = sample.value if known is None else merge(known, sample.value)

    def collect(self) -> Iterator[Metric]:
        for name, family in self._families.items():
            metric = Metric(name, family.help_text, family.kind)
            for (sample_name, labels), value in family.values.items():
                metric.add_sample(sample_name, dict(labels), value)
            yield metric

    def render(self) -> bytes:
        return generate_latest(self)  # all that it asks of a registry is to collect


class Totals:
    def __init__(self) -> None:
        self._last: dict[int, str] = {}  # by the worker's number: what it said last
        self._of_the_dead = _Sum()

    def note(self, worker: int, text: str) -> None:
        self._last[worker] = text

    def died(self, worker: int) -> None:
        """What it had counted stays."""
        self._of_the_dead.add(self._last.pop(worker, ""), with_gauges=False)

    def render(self) -> bytes:
        total = _Sum()
        for text in [self._of_the_dead.render().decode(), *self._last.values()]:
            total.add(text)
        return total.render()
