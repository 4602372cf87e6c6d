"""How fast the blocks of one transfer come, and whether what is outstanding had better be computed here.

asked ---- first lands -- lands ------ lands ........ nothing .......> given up
  |<-latency->|<------ bandwidth ------->|<- as long as computing ->|
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from kvasir.kv_connector.base import KVBlock
from kvasir.kv_connector.costs import ComputeCost, CostRule, RateMeter


class TooSlow(Exception):
    """Computing what is outstanding is faster."""


class Pace:
    """Of one transfer. `begin` and `end` stand around each time in which something is asked for and not yet there."""

    def __init__(
        self,
        rule: CostRule,
        meter: RateMeter,
        bytes_per_block: int,
        compute_s: ComputeCost,
        clock: Callable[[], float],
    ) -> None:
        self._rule = rule
        self._meter = meter
        self._bytes_per_block = bytes_per_block
        self._compute_s = compute_s
        self._clock = clock
        self._began_s = 0.0
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_landed = 0

    def check_before(self, blocks: Sequence[KVBlock]) -> None:
        """By what the source was last measured to give. `blocks`: those that are asked for now, and all to come."""
        rate = self._meter.ask()
        if rate is not None:
            self._check(rate.fetch_s(len(blocks) * self._bytes_per_block), blocks)

    def begin(self) -> None:
        self._began_s = self._clock()
        self._first_s = None
        self._num_landed = 0

    def landed(self) -> None:
        """One more."""
        self._last_s = self._clock()
        self._first_s = self._last_s if self._first_s is None else self._first_s
        self._num_landed += 1

    def check(self, outstanding: Sequence[KVBlock]) -> None:
        """By how fast blocks have come so far; `outstanding` have been asked for."""
        elapsed_s = self._last_s - self._began_s
        if self._num_landed and elapsed_s >= self._rule.patience_s:
            self._check(elapsed_s * len(outstanding) / self._num_landed, outstanding)

    def wait_s(self, blocks: Sequence[KVBlock]) -> float:
        """How long to wait for the next one, from now. `blocks` would be given up."""
        return self._rule.give_up_after_s(self._compute_s(_num_tokens(blocks)))

    def end(self, *, is_stuck: bool) -> None:
        """`is_stuck`: something was still outstanding, so that the time until now counts."""
        end_s = self._clock() if is_stuck else self._last_s
        if self._first_s is not None:
            self._meter.note_latency(self._first_s - self._began_s)
            if self._num_landed > 1 or is_stuck:
                self._meter.note((self._num_landed - 1) * self._bytes_per_block, end_s - self._first_s)
        elif is_stuck:
            self._meter.note(0, end_s - self._began_s)

    def _check(self, fetch_s: float, blocks: Sequence[KVBlock]) -> None:
        compute_s = self._compute_s(_num_tokens(blocks))
        if not self._rule.is_worth_fetching(fetch_s, compute_s):
            raise TooSlow(f"{len(blocks)} blocks would take {fetch_s:.2f} s to come, {compute_s:.2f} s to compute")


def _num_tokens(blocks: Sequence[KVBlock]) -> int:
    return sum(map(attrgetter("num_tokens"), blocks))
