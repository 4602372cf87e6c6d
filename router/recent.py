"""What the last minutes were like: latencies by slices of time, and which nodes served which answer. For people."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_MAX_SAMPLES = 1024  # of one kind in one slice; the newest count
_MAX_ANSWERS = 256


@dataclass(frozen=True, slots=True)
class Latencies:
    """One slice of time. Seconds; None where there was nothing to measure."""

    end_s: float  # before now, so 0 or less
    num_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


Samples = tuple[int, int, list[float], list[float]]  # a slice's number, tokens, TTFTs and gaps; as JSON has them


@dataclass(eq=False, slots=True)
class _Slice:
    number: int
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    itl_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    num_tokens: int = 0


class Recent:
    def __init__(self, clock: Callable[[], float], slice_s: float = 5.0, num_slices: int = 60) -> None:
        self._clock = clock
        self._slice_s = slice_s
        self._num_slices = num_slices
        self._slices: deque[_Slice] = deque(maxlen=num_slices)
        self._current_ends_s = -math.inf
        self._served_by: OrderedDict[str, list[str]] = OrderedDict()

    def first_token(self, ttft_s: float) -> None:
        self._slice(self._clock()).ttft_s.append(ttft_s)

    def tokens(self, num_tokens: int, itl_s: float | None, now_s: float) -> None:
        """That came together at `now_s`, each so long after the one before; None: they are a choice's first."""
        current = self._slices[-1] if now_s < self._current_ends_s else self._slice(now_s)
        current.num_tokens += num_tokens
        if itl_s is None:
            return
        if num_tokens == 1:
            current.itl_s.append(itl_s)
        else:
            current.itl_s.extend([itl_s] * num_tokens)

    def served(self, response_id: str, node: str) -> None:
        """`node` gave tokens of this answer."""
        nodes = self._served_by.setdefault(response_id, [])
        if node and (not nodes or nodes[-1] != node):
            nodes.append(node)
        if len(self._served_by) > _MAX_ANSWERS:
            self._served_by.popitem(last=False)

    def served_by(self, response_id: str) -> list[str]:
        """The nodes that gave its tokens, in order: first the prefill node, then decode nodes. Empty: not known."""
        return list(self._served_by.get(response_id, ()))

    def slices(self) -> list[Samples]:
        return [(one.number, one.num_tokens, list(one.ttft_s), list(one.itl_s)) for one in self._slices]

    def summaries(self, of_all: Iterable[Iterable[Samples]]) -> list[Latencies]:
        """Of several processes together, whose clocks are one. Oldest first; also those in which nothing happened."""
        known: dict[int, _Slice] = {}
        for number, num_tokens, ttft_s, itl_s in (samples for slices in of_all for samples in slices):
            one = known.setdefault(number, _Slice(number, deque(), deque()))
            one.num_tokens += num_tokens
            one.ttft_s.extend(ttft_s)
            one.itl_s.extend(itl_s)
        current = self._number(self._clock())
        return [
            self._summary(known.get(number, _Slice(number)), current)
            for number in range(current - self._num_slices + 1, current + 1)
        ]

    def _summary(self, one: _Slice, current: int) -> Latencies:
        return Latencies(
            end_s=(one.number - current) * self._slice_s,
            num_tokens=one.num_tokens,
            ttft_p50_s=_quantile(one.ttft_s, 0.5),
            ttft_p99_s=_quantile(one.ttft_s, 0.99),
            itl_p50_s=_quantile(one.itl_s, 0.5),
            itl_p99_s=_quantile(one.itl_s, 0.99),
        )

    def _number(self, at_s: float) -> int:
        return int(at_s // self._slice_s)

    def _slice(self, at_s: float) -> _Slice:
        number = self._number(at_s)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        self._current_ends_s = (number + 1) * self._slice_s
        return self._slices[-1]


def _quantile(samples: deque[float], share: float) -> float | None:
    """The smallest sample that `share` of all do not exceed."""
    if not samples:
        return None
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]
