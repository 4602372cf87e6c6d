import math

from kvasir.common.metrics import Metrics
from kvasir.common.tally import Tally

BUCKETS = (0.001, 0.5, 2.0)


def rendered(metrics: Metrics) -> list[bytes]:
    """But for what the process itself is like, which changes meanwhile."""
    return [line for line in metrics.render()[0].splitlines() if b"process_" not in line]


def test_it_shows_what_a_histogram_would() -> None:
    tallied, counted = Metrics({"model_name": "m"}), Metrics({"model_name": "m"})
    tally, histogram = Tally(tallied, "x_s", "An x.", BUCKETS), counted.histogram("x_s", "An x.", BUCKETS)
    assert rendered(tallied) == rendered(counted)
    for value in (0.0, 0.001, 0.0011, 0.5, 1.0, 2.0, 2.5, 1e9):
        tally(value)
        histogram(value)
    tally(0.25, times=3)
    for _ in range(3):
        histogram(0.25)
    assert rendered(tallied) == rendered(counted)


def test_what_is_no_time_is_dropped_and_counted() -> None:
    metrics = Metrics()
    tally = Tally(metrics, "x_s", "An x.", BUCKETS)
    before = rendered(metrics)
    for value in (-1.0, math.nan, math.inf):
        tally(value)
    after = rendered(metrics)
    after.remove(b'kvasir:dropped_samples_total{metric="x_s"} 3.0')
    assert after == before
