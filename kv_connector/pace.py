"""How fast the blocks of one transfer arrive, and whether computing the outstanding ones here would be faster.

asked ---- first lands -- lands ------ lands ........ nothing .......> given up
  |<-latency->|<------ bandwidth ------->|<- as long as computing ->|
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

from kvasir.kv_connector.base import KVBlock
from kvasir.kv_connector.costs import ComputeCost, CostRule, RateMeter


class TooSlow(Exception):
    """Computing the outstanding blocks here is faster than waiting for them."""


class Pace:
    """Measures one transfer. `begin` and `end` enclose each time in which blocks have been asked for."""

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
        """Raises TooSlow by the source's last measured rate. `blocks`: those asked for now, and all to follow."""
        rate = self._meter.ask()
        if rate is not None:
            self._check(rate.fetch_s(len(blocks) * self._bytes_per_block), blocks)

    def begin(self) -> None:
        self._began_s = self._clock()
        self._first_s = None
        self._num_landed = 0

    def landed(self) -> None:
        """One more block has landed."""
        self._last_s = self._clock()
        self._first_s = self._last_s if self._first_s is None else self._first_s
        self._num_landed += 1

    def check(self, outstanding: Sequence[KVBlock]) -> None:
        """Raises TooSlow by the speed of this transfer so far. `outstanding`: blocks that have been asked for."""
        elapsed_s = self._last_s - self._began_s
        if self._num_landed and elapsed_s >= self._rule.patience_s:
            self._check(elapsed_s * len(outstanding) / self._num_landed, outstanding)

    def wait_s(self, blocks: Sequence[KVBlock]) -> float:
        """How many seconds from now to wait for the next block, before giving up `blocks`."""
        return self._rule.give_up_after_s(self._compute_s(_num_tokens(blocks)))

    def end(self, *, is_stuck: bool) -> None:
        """Note what was measured. `is_stuck`: blocks were still outstanding, so the time until now counts too."""
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
