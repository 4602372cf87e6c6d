"""What the benchmark measures, each metric once, as a pure function of timestamps.

The definitions are those of vLLM's `bench serve`, so that numbers can be compared:

  TTFT   request sent -> first streamed chunk
  ITL    one gap between two streamed chunks (a distribution over all gaps of all requests); a last chunk that
         only says why the answer ends, after all of its tokens, is none
  E2EL   request sent -> last streamed chunk
  TPOT   (E2EL - TTFT) / (output tokens - 1); a request of one token has none
  goodput  requests per second that met every objective; a TPOT that does not exist counts as met
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When one request was sent and when each chunk of its answer arrived, on one monotonic clock, in seconds."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    num_output_tokens: int

    def __post_init__(self) -> None:
        if not self.arrivals_s:
            raise ValueError("a request without any chunk has no timeline")

    @property
    def ended_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def e2el_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.num_output_tokens <= 1:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """The service levels that goodput asks for; None asks for nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def met_by(self, timeline: Timeline) -> bool:
        limits = (
            (self.ttft_s, timeline.ttft_s),
            (self.tpot_s, timeline.tpot_s or 0.0),
            (self.e2el_s, timeline.e2el_s),
        )
        return all(limit is None or measured <= limit for limit, measured in limits)


def goodput_rps(timelines: Sequence[Timeline], objectives: Objectives, duration_s: float) -> float:
    """A request that failed has no timeline and so was not good."""
    return sum(objectives.met_by(timeline) for timeline in timelines) / duration_s


def peak_tokens_per_s(timelines: Sequence[Timeline]) -> float:
    """The most chunks that arrived within one second, seconds counted from the first request."""
    if not timelines:
        return 0.0
    origin_s = min(timeline.sent_s for timeline in timelines)
    seconds = Counter(int(arrival - origin_s) for timeline in timelines for arrival in timeline.arrivals_s)
    return float(max(seconds.values()))


def peak_concurrency(timelines: Sequence[Timeline]) -> int:
    """The most requests in flight at one moment; one that ends as another begins does not overlap it."""
    changes = [(timeline.sent_s, 1) for timeline in timelines] + [(timeline.ended_s, -1) for timeline in timelines]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest: [10, 20], 75 -> 17.5"""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))
