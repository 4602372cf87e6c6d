"""Who could not be reached is left alone for a while: each time longer, up to a few seconds."""

from collections import OrderedDict
from collections.abc import Callable

from kvasir.common.errors import KVTransferError

_FIRST_S = 0.1
_LONGEST_S = 5.0
_NUM_REMEMBERED = 1024


class BackOff:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failing: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how long, and until when

    def check(self, address: str) -> None:
        """Raises while the address is being left alone."""
        _, until_s = self._failing.get(address, (0.0, 0.0))
        left_s = until_s - self._clock()
        if left_s > 0:
            raise KVTransferError(f"{address} could not be reached lately; it is tried again in {left_s:.1f} s")

    def failed(self, address: str) -> None:
        last_s, _ = self._failing.pop(address, (0.0, 0.0))
        wait_s = min(2 * last_s, _LONGEST_S) or _FIRST_S
        self._failing[address] = wait_s, self._clock() + wait_s
        if len(self._failing) > _NUM_REMEMBERED:
            self._failing.popitem(last=False)

    def worked(self, address: str) -> None:
        self._failing.pop(address, None)
