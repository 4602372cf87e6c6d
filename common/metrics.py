"""Prometheus metrics that cannot hurt a request.

Recording never raises: a negative increment, a NaN, a label that is not there drop that one sample, count it in
`kvasir:dropped_samples_total{metric}` and log a line. Names follow vLLM where it has one (`vllm:...`), since
dashboards depend on them; what only we have is `kvasir:...`.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvasir.common.histogram import Histogram
from kvasir.common.logging import Sparse

log = logging.getLogger(__name__)
disable_created_metrics()  # type: ignore[no-untyped-call]

TTFT_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# From half a millisecond: fast decoding is far below the 10 ms where others begin.
ITL_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Metrics:
    """The metrics of one process. `labels` stand on every one of them."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes, process_cpu_seconds_total, ...
        self._labels = dict(labels or {})
        self._sparse = Sparse()
        self._dropped = Counter(
            "kvasir:dropped_samples", "Samples that were wrong and not recorded.", ["metric"], registry=self.registry
        )

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> "Recorder":
        """`name` without `_total`."""
        metric = Counter(name, help_text, (*self._labels, *labels), registry=self.registry)
        return Recorder(self, name, metric, Counter.inc, self._labels, labels)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> "Recorder":
        metric = Gauge(name, help_text, (*self._labels, *labels), registry=self.registry)
        return Recorder(self, name, metric, Gauge.set, self._labels, labels)

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, help_text, buckets, self._labels, self.drop)
        self.registry.register(histogram)
        return histogram

    def sampled(self, read: Callable[[], Iterable["Sample"]]) -> None:
        """Values that somebody else keeps: `read` is asked for them at every scrape."""
        self.registry.register(_SampledCollector(self, read))

    def render(self) -> tuple[bytes, str]:
        """What `/metrics` answers, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def drop(self, name: str, why: object) -> None:
        self._dropped.labels(metric=name).inc()
        if self._sparse.allows(name):
            log.warning("dropped a sample of %s: %s", name, why)

    def with_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {**self._labels, **labels}


class Recorder:
    """One counter or gauge. Call it with a value and the values of its own labels; it never raises."""

    def __init__(
        self,
        metrics: Metrics,
        name: str,
        metric: Counter | Gauge,
        record: Callable[[Any, float], None],
        labels: Mapping[str, str],
        own_labels: Sequence[str],
    ) -> None:
        self._metrics = metrics
        self._name = name
        self._metric = metric
        self._record = record
        self._may_be_negative = isinstance(metric, Gauge)
        self._labelled: dict[tuple[tuple[str, str], ...], Counter | Gauge] = {}  # by their labels
        self._only: Counter | Gauge | None = None  # where no sample has labels of its own
        if not own_labels:  # then it is shown as 0 from the start, not from the first sample on
            self._only = metric.labels(**labels) if labels else metric

    def __call__(self, value: float = 1.0, **labels: str) -> None:
        try:
            if not math.isfinite(value) or (value < 0 and not self._may_be_negative):
                raise ValueError(f"got {value}")
            self._record(self._only if self._only is not None and not labels else self._with(labels), value)
        except Exception as error:  # whatever it is, the request that is being served is worth more
            self._metrics.drop(self._name, error)

    def show(self, **labels: Iterable[str]) -> None:
        """All samples with these values of its own labels, as 0 from the start: a rate of what begins with its first
        sample misses that one."""
        for values in product(*labels.values()):
            self._with(dict(zip(labels, values, strict=True)))

    def _with(self, labels: Mapping[str, str]) -> Counter | Gauge:
        key = tuple(labels.items())
        metric = self._labelled.get(key)
        if metric is None:
            metric = self._labelled[key] = self._metric.labels(**self._metrics.with_labels(labels))
        return metric


@dataclass(frozen=True, slots=True)
class Sample:
    """One value at scrape time. Counters are named without `_total`."""

    name: str
    help_text: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    is_counter: bool = False


class _SampledCollector(Collector):
    def __init__(self, metrics: Metrics, read: Callable[[], Iterable[Sample]]) -> None:
        self._metrics = metrics
        self._read = read

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or the registry would ask for values before there are any

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        try:
            for sample in self._read():
                self._add(families, sample)
        except Exception as error:
            self._metrics.drop("sampled", error)
        return iter(families.values())

    def _add(self, families: dict[str, GaugeMetricFamily | CounterMetricFamily], sample: Sample) -> None:
        if not math.isfinite(sample.value):
            self._metrics.drop(sample.name, f"got {sample.value}")
            return
        labels = self._metrics.with_labels(sample.labels)
        if sample.name not in families:
            family = CounterMetricFamily if sample.is_counter else GaugeMetricFamily
            families[sample.name] = family(sample.name, sample.help_text, labels=list(labels))
        families[sample.name].add_metric(list(labels.values()), sample.value)
