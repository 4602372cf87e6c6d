"""Whether something grows while a service runs: the slope of what scatters. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_SLICES = 20


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through samples (seconds, value)."""

    median: float
    per_s: float  # slope
    span_s: float  # from the first sample to the last

    @property
    def growth(self) -> float:
        """From one end of the span to the other, as a share of the median."""
        return self.per_s * self.span_s / self.median if self.median else 0.0


def trend(samples: Sequence[tuple[float, float]]) -> Trend | None:
    """By least squares through the medians of slices of time, so that a single outlier tilts nothing; None of too few.

    samples: in any order.
    """
    ordered = sorted(samples)
    if len(ordered) < 3 or ordered[0][0] == ordered[-1][0]:
        return None
    each = max(1, len(ordered) // _NUM_SLICES)
    slices = [ordered[start : start + each] for start in range(0, len(ordered), each)]
    points = [tuple(statistics.median(column) for column in zip(*part, strict=True)) for part in slices]
    slope = statistics.linear_regression([at_s for at_s, _ in points], [value for _, value in points]).slope
    return Trend(statistics.median(value for _, value in ordered), slope, ordered[-1][0] - ordered[0][0])
