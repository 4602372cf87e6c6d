"""Whether drafts pay, by what was measured: how often they are kept, and what verifying them costs.

    price of a draft = the time that it adds to a step / the time in which a token is generated without drafts

The i-th draft of a row is kept with the chance rate ** i, and is worth its price if that chance is higher. So a request
whose drafts are seldom kept gets fewer and then none, in a batch in which verifying is dear sooner than alone; and it
is tried again now and then, with one draft. A step without drafts is put in where that time is not known any more.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

_MEMORY, _MEMORY_OF_ALL = 0.9, 0.98  # what a request's last drafts count when the next are verified
_PRIOR_WEIGHT = 3.0  # drafts of this request that count as much as what is known of all requests
_FIRST_RATE = 0.6  # of all requests, before there were any
_FIRST_PRICE = 0.1
_LOWEST_PRICE = 0.02
_FIRST_PATIENCE, _LAST_PATIENCE = 16, 128  # steps without a draft, before one is tried again
_PLAIN_EVERY = 64  # steps with drafts
_FEWEST_SAMPLES = 3
_NUM_SAMPLES = 9  # of which the median counts: a machine that was busy elsewhere for a moment is no price


@dataclass(eq=False, slots=True)
class Acceptance:
    """How often drafts were kept, the latest counting most."""

    memory: float = _MEMORY
    num_kept: float = 0.0
    num_tried: float = 0.0

    def note(self, num_drafts: int, num_kept: int) -> None:
        """The first that is not kept is the last that says anything."""
        self.num_kept = self.memory * self.num_kept + num_kept
        self.num_tried = self.memory * self.num_tried + min(num_kept + 1, num_drafts)

    def rate(self, prior: float) -> float:
        return (self.num_kept + _PRIOR_WEIGHT * prior) / (self.num_tried + _PRIOR_WEIGHT)


@dataclass(eq=False, slots=True)
class Track:
    """What one request's drafts have come to so far."""

    acceptance: Acceptance
    num_steps_without: int = 0
    patience: int = _FIRST_PATIENCE


class StepCosts:
    """How long steps take that decode so many requests, with drafts and without."""

    def __init__(self) -> None:
        self._plain_s: dict[int, deque[float]] = {}
        self._extra_s: dict[int, deque[float]] = {}  # for each draft
        self._num_since_plain: dict[int, int] = {}

    def note(self, num_seqs: int, num_drafts: int, step_s: float) -> None:
        """A step that did nothing but decode."""
        if num_drafts == 0:
            _last(self._plain_s, num_seqs).append(step_s)
            self._num_since_plain[num_seqs] = 0
        elif num_seqs in self._plain_s:
            extra_s = step_s - median(self._plain_s[num_seqs])
            _last(self._extra_s, num_seqs).append(extra_s / num_drafts)
            self._num_since_plain[num_seqs] += 1

    def wants_plain(self, num_seqs: int) -> bool:
        is_known = len(self._plain_s.get(num_seqs, ())) >= _FEWEST_SAMPLES
        return not is_known or self._num_since_plain[num_seqs] >= _PLAIN_EVERY

    def price(self, num_seqs: int) -> float:
        """Of one draft, in tokens; by the nearest number of requests for which it is known."""
        nearest = _nearest(num_seqs, self._extra_s)
        if nearest is None:
            return _FIRST_PRICE
        token_s = median(self._plain_s[nearest]) / nearest
        return max(median(self._extra_s[nearest]) / token_s, _LOWEST_PRICE) if token_s > 0 else _LOWEST_PRICE


class Payoff:
    """Decides; takes numbers and gives numbers."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._overall = Acceptance(_MEMORY_OF_ALL)

    @property
    def rate(self) -> float:
        """How often a draft is kept, over all requests."""
        return self._overall.rate(_FIRST_RATE)

    def new_track(self) -> Track:
        return Track(Acceptance())

    def num_drafts(self, track: Track, num_seqs: int, most: int) -> int:
        """How many drafts the request should have, in a step that decodes `num_seqs` of them."""
        pay = num_that_pay(track.acceptance.rate(self.rate), self.costs.price(num_seqs), most)
        if pay == 0 and track.num_steps_without >= track.patience:
            return min(most, 1)
        return pay

    def note_without(self, track: Track) -> None:
        """The request was decoded without a draft."""
        track.num_steps_without += 1

    def note_drafts(self, track: Track, num_drafts: int, num_kept: int) -> None:
        was_tried_again = track.num_steps_without >= track.patience
        track.num_steps_without = 0
        if num_kept:
            track.patience = _FIRST_PATIENCE
        elif was_tried_again:
            track.patience = min(2 * track.patience, _LAST_PATIENCE)
        track.acceptance.note(num_drafts, num_kept)
        self._overall.note(num_drafts, num_kept)


def num_that_pay(rate: float, price: float, most: int) -> int:
    """rate 0.8, price 0.5, most 4 -> 3: the chances are 0.8, 0.64, 0.51, 0.41"""
    num_drafts, chance = 0, rate
    while num_drafts < most and chance > price:
        num_drafts += 1
        chance *= rate
    return num_drafts


def _last(samples: dict[int, deque[float]], num_seqs: int) -> deque[float]:
    return samples.setdefault(num_seqs, deque(maxlen=_NUM_SAMPLES))


def _nearest(num_seqs: int, known: Iterable[int]) -> int | None:
    return min(known, key=lambda one: abs(one - num_seqs), default=None)
