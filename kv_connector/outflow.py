"""How fast a transport sends the blocks that it is lent, measured over the time in which it holds any."""

from collections.abc import Callable

from kvasir.kv_connector.costs import RateMeter
from kvasir.kv_connector.metrics import TransferMetrics

_MAX_SAMPLE_S = 0.5  # one sample ends after this, for transports that always hold some block


class Outflow:
    def __init__(self, meter: RateMeter, metrics: TransferMetrics, clock: Callable[[], float]) -> None:
        self.num_lent = 0
        self.num_bytes_lent = 0
        self._meter = meter
        self._metrics = metrics
        self._clock = clock
        self._since_s = 0.0
        self._num_bytes = 0  # given back since then

    def lent(self, num_bytes: int) -> None:
        if self.num_lent == 0:
            self._since_s = self._clock()
        self.num_lent += 1
        self.num_bytes_lent += num_bytes
        self._metrics.blocks_sent += 1
        self._metrics.bytes_sent += num_bytes

    def given_back(self, num_bytes: int) -> None:
        self.num_lent -= 1
        self.num_bytes_lent -= num_bytes
        self._num_bytes += num_bytes
        elapsed_s = self._clock() - self._since_s
        if self.num_lent == 0 or elapsed_s > _MAX_SAMPLE_S:
            self._meter.note(self._num_bytes, elapsed_s)
            self._metrics.send_s += elapsed_s
            self._since_s += elapsed_s
            self._num_bytes = 0
