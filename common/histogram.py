"""Histograms whose recording costs next to nothing: plain numbers, made into a metric when somebody asks for it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """Costs a tenth of a Prometheus client's. One thread records; others may ask."""

    def __init__(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float],
        labels: Mapping[str, str],
        drop: Callable[[str, object], None],
    ) -> None:
        """`drop` is told of samples that are wrong, with the name."""
        self._name = name
        self._help_text = help_text
        self._labels = dict(labels)
        self._drop = drop
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def __call__(self, value: float, times: int = 1) -> None:
        """Never raises: what is no number, or negative, is dropped and counted."""
        try:
            if not 0 <= value < float("inf"):
                raise ValueError(f"got {value}")
            self._counts[bisect_left(self._bounds, value)] += times
            self._sum += value * times
        except Exception as error:  # whatever it is, the request that is being served is worth more
            self._drop(self._name, error)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._help_text)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=list(self._labels))
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
