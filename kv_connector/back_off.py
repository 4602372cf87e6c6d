"""Does not retry an unreachable peer for a while: longer after each failure, up to a few seconds."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvasir.common.errors import KVTransferError

_FIRST_S = 0.1
_LONGEST_S = 5.0
_NUM_REMEMBERED = 1024


class _Failure(NamedTuple):
    wait_s: float
    until_s: float
    kind: type[KVTransferError]
    why: str


class BackOff:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failing: OrderedDict[str, _Failure] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises the address's last error while it must not be tried again yet."""
        if address not in self._failing:
            return
        failure = self._failing[address]
        left_s = failure.until_s - self._clock()
        if left_s > 0:
            raise failure.kind(f"{failure.why}; it is tried again in {left_s:.1f} s")

    def failed(self, address: str, error: KVTransferError) -> None:
        last = self._failing.pop(address, None)
        wait_s = min(2 * last.wait_s, _LONGEST_S) if last is not None else _FIRST_S
        self._failing[address] = _Failure(wait_s, self._clock() + wait_s, type(error), str(error))
        if len(self._failing) > _NUM_REMEMBERED:
            self._failing.popitem(last=False)

    def worked(self, address: str) -> None:
        self._failing.pop(address, None)
