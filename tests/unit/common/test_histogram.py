import math

import prometheus_client
import pytest

from kvasir.common.metrics import Metrics

BUCKETS = (0.001, 0.5, 2.0)


def rendered(metrics: Metrics) -> list[bytes]:
    """But for what the process itself is like, which changes meanwhile."""
    return [line for line in metrics.render()[0].splitlines() if b"process_" not in line]


@pytest.mark.parametrize("labels", [{}, {"model_name": "m"}])
def test_it_shows_what_that_of_the_prometheus_client_shows(labels: dict[str, str]) -> None:
    own, theirs = Metrics(labels), Metrics(labels)
    histogram = own.histogram("x_s", "An x.", BUCKETS)
    reference = prometheus_client.Histogram("x_s", "An x.", labels, buckets=BUCKETS, registry=theirs.registry)
    if labels:
        reference = reference.labels(**labels)
    assert rendered(own) == rendered(theirs)
    for value in (0.0, 0.001, 0.0011, 0.5, 1.0, 2.0, 2.5, 1e9):
        histogram(value)
        reference.observe(value)
    histogram(0.25, times=3)
    for _ in range(3):
        reference.observe(0.25)
    assert rendered(own) == rendered(theirs)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, None])
def test_what_is_no_time_is_dropped_and_counted(value: float) -> None:
    metrics = Metrics()
    histogram = metrics.histogram("x_s", "An x.", BUCKETS)
    before = rendered(metrics)
    histogram(value)
    after = rendered(metrics)
    after.remove(b'kvasir:dropped_samples_total{metric="x_s"} 1.0')
    assert after == before
