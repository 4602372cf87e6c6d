"""Fetch, or compute here? What sources have been measured to give, and the rule that weighs it. Pure: it has no clock
of its own, and does nothing.

Bandwidth is counted in bytes of blocks as they lie in this node's cache, whatever a codec makes of them on the way.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvasir.kv_connector.base import CODEC_LOSSLESS, CODEC_NONE

# How long computing so many tokens here would take, the harm to others included; None: not known.
ComputeCost = Callable[[int], float | None]

_FORGETTING = 0.7  # what a measurement keeps of its weight when the next one comes
_MIN_SECONDS = 0.2  # less says nothing of a bandwidth, unless it is of many blocks
_MIN_BLOCKS = 8
_NUM_SOURCES = 256
_NO_CODEC_PAYS_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Rate:
    bandwidth_bytes_per_s: float
    latency_s: float

    def fetch_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRule:
    """When fetching is given up for computing."""

    always_fetch_s: float = 0.1  # what takes less is not worth a thought
    patience_s: float = 2.0  # a transfer that is under way has this long to show how fast it is
    forget_after_s: float = 10.0  # then a source that was too slow is tried again

    def is_worth_fetching(self, fetch_s: float, compute_s: float | None) -> bool:
        """Where the cost of computing is not known, fetching is what was asked for."""
        return compute_s is None or fetch_s <= max(self.always_fetch_s, compute_s)

    def give_up_after_s(self, compute_s: float | None) -> float:
        """Since the last block that landed. Who has waited for as long as computing takes has lost no more than that
        by waiting, and by then nothing says that the next block is near."""
        return float("inf") if compute_s is None else max(self.patience_s, compute_s)


ALWAYS_FETCH = CostRule(always_fetch_s=float("inf"), patience_s=float("inf"))  # whatever computing costs


class RateMeter:
    """One source. What is older counts less, and what is too old is measured anew by whoever asks next."""

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
        """As last measured; None: too little to tell."""
        if self._num_bytes < self._min_bytes and self._seconds < _MIN_SECONDS:
            return None
        return Rate(max(self._num_bytes, 1.0) / max(self._seconds, 1e-9), self._latency_s)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        rate = self.rate
        return rate.bandwidth_bytes_per_s if rate is not None else None

    @property
    def current(self) -> Rate | None:
        """The same, but None as well once it is too old to go by, and nobody finds out yet how it is now."""
        return None if self._clock() - self._measured_at_s >= self._forget_after_s else self.rate

    def ask(self) -> Rate | None:
        """The same, of one who will fetch where he is told nothing, and so finds out; others go by the old value
        until he has."""
        rate = self.current
        if rate is None and self.rate is not None:
            self._measured_at_s = self._clock()
            self._is_stale = True
        return rate

    def note(self, num_bytes: int, seconds: float) -> None:
        """So many bytes came in a time in which nothing but the source was waited for."""
        kept = 0.0 if self._is_stale else _FORGETTING
        self._num_bytes = kept * self._num_bytes + num_bytes
        self._seconds = kept * self._seconds + seconds
        self._measured_at_s = self._clock()
        self._is_stale = False

    def note_latency(self, seconds: float) -> None:
        """From asking to the first block; to be noted before what came after it."""
        old = seconds if self._is_stale else self._latency_s or seconds
        self._latency_s = _FORGETTING * old + (1 - _FORGETTING) * seconds


class Rates:
    """A meter for each source by its name, the ones used last."""

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
        """What one block takes to come, by the mean bandwidth of what has been measured; 0: nothing has been."""
        bandwidths = [rate.bandwidth_bytes_per_s for rate in self.known().values()]
        return self._bytes_per_block * len(bandwidths) / sum(bandwidths) if bandwidths else 0.0

    def known(self) -> dict[str, Rate]:
        return {source: meter.rate for source, meter in self._meters.items() if meter.rate is not None}


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """What encoding was measured to do; decoding is taken to be as fast."""

    bytes_per_s: float
    ratio: float  # size before / size after


def choose_codec(bandwidth_bytes_per_s: float | None, lossless: CodecSpeed | None) -> str:
    """`auto`: lossless where packing and unpacking take less time than they save on the way.

    Without a measurement of the way, nothing is packed; without one of the codec, a slow way is reason to take one.
    """
    if bandwidth_bytes_per_s is None or bandwidth_bytes_per_s >= _NO_CODEC_PAYS_BYTES_PER_S:
        return CODEC_NONE
    if lossless is None:
        return CODEC_LOSSLESS
    packing_s = 2 / lossless.bytes_per_s
    saved_s = (1 - 1 / max(lossless.ratio, 1e-9)) / bandwidth_bytes_per_s
    return CODEC_LOSSLESS if packing_s < saved_s else CODEC_NONE
