"""Fetch a block, or compute it here? The measured rate of each source, and the rule that weighs the two.

Pure: no clock of its own, no I/O. Bandwidth counts the bytes of blocks as they lie in this node's cache, not the fewer
bytes that a codec may send.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

# Tokens -> seconds that computing them here would take, including the delay of other requests; None: not known.
ComputeCost = Callable[[int], float | None]

_FORGETTING = 0.7  # the share of its weight that a measurement keeps when the next one comes
_MIN_SECONDS = 0.2  # a bandwidth is believed after this time, or after so many blocks
_MIN_BLOCKS = 8
_NUM_SOURCES = 256  # meters kept


@dataclass(frozen=True, slots=True)
class Rate:
    bandwidth_bytes_per_s: float
    latency_s: float

    def fetch_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRule:
    """When to give up fetching and compute."""

    always_fetch_s: float = 0.1  # a fetch that is expected to take less is never given up
    patience_s: float = 2.0  # a transfer that has begun has this long to show how fast it is
    forget_after_s: float = 10.0  # after this, a source that was too slow is tried again

    def is_worth_fetching(self, fetch_s: float, compute_s: float | None) -> bool:
        """compute_s None: unknown, and then fetching is right."""
        return compute_s is None or fetch_s <= max(self.always_fetch_s, compute_s)

    def give_up_after_s(self, compute_s: float | None) -> float:
        """Seconds to wait after a block for the next one: as long as computing would take, but at least `patience_s`.

        Waiting in vain then costs no more than computing does, and nothing suggests any longer that a block is near.
        """
        return float("inf") if compute_s is None else max(self.patience_s, compute_s)


ALWAYS_FETCH = CostRule(always_fetch_s=float("inf"), patience_s=float("inf"))  # whatever computing costs


class RateMeter:
    """The rate of one source. Older measurements count less; a rate that is too old is measured anew by whoever asks
    next."""

    def __init__(self, bytes_per_block: int, forget_after_s: float, clock: Callable[[], float]) -> None:
        self._min_bytes = _MIN_BLOCKS * bytes_per_block
        self._forget_after_s = forget_after_s
        self._clock = clock
        self._num_bytes = 0.0
        self._seconds = 0.0
        self._latency_s = 0.0
        self._measured_at_s = 0.0
        self._is_stale = False

    @property
    def rate(self) -> Rate | None:
        """As last measured, however long ago; None: too little has been measured."""
        if self._num_bytes < self._min_bytes and self._seconds < _MIN_SECONDS:
            return None
        return Rate(max(self._num_bytes, 1.0) / max(self._seconds, 1e-9), self._latency_s)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        rate = self.rate
        return rate.bandwidth_bytes_per_s if rate is not None else None

    @property
    def current(self) -> Rate | None:
        """The same, but None if it is too old, and nobody is measuring it again yet."""
        return None if self._clock() - self._measured_at_s >= self._forget_after_s else self.rate

    def ask(self) -> Rate | None:
        """As `current`, for a caller that will fetch if it gets None. Its fetch measures the rate anew; until then,
        other callers get the old rate."""
        rate = self.current
        if rate is None and self.rate is not None:
            self._measured_at_s = self._clock()
            self._is_stale = True
        return rate

    def note(self, num_bytes: int, seconds: float) -> None:
        """So many bytes came in so many seconds, in which nothing but the source was waited for."""
        kept = 0.0 if self._is_stale else _FORGETTING
        self._num_bytes = kept * self._num_bytes + num_bytes
        self._seconds = kept * self._seconds + seconds
        self._measured_at_s = self._clock()
        self._is_stale = False

    def note_latency(self, seconds: float) -> None:
        """Seconds from asking to the first block. Call it before `note` for the blocks after that one."""
        old = seconds if self._is_stale else self._latency_s or seconds
        self._latency_s = _FORGETTING * old + (1 - _FORGETTING) * seconds


class Rates:
    """A meter for each source, by name. The least recently used are forgotten."""

    def __init__(self, bytes_per_block: int, forget_after_s: float, clock: Callable[[], float]) -> None:
        self._bytes_per_block = bytes_per_block
        self._new_meter = partial(RateMeter, bytes_per_block, forget_after_s, clock)
        self._meters: OrderedDict[str, RateMeter] = OrderedDict()

    def of(self, source: str) -> RateMeter:
        meter = self._meters.get(source) or self._meters.setdefault(source, self._new_meter())
        self._meters.move_to_end(source)
        if len(self._meters) > _NUM_SOURCES:
            self._meters.popitem(last=False)
        return meter

    @property
    def mean_block_s(self) -> float:
        """Seconds per block at the mean bandwidth of all sources; 0 if nothing has been measured."""
        bandwidths = [rate.bandwidth_bytes_per_s for rate in self.known().values()]
        return self._bytes_per_block * len(bandwidths) / sum(bandwidths) if bandwidths else 0.0

    def known(self) -> dict[str, Rate]:
        return {source: meter.rate for source, meter in self._meters.items() if meter.rate is not None}
