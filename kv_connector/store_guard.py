"""A circuit breaker for a store that is down, full, read-only or slow: it is left alone for a while, then tried again.

working --failure--> left alone --time--> one call tries --success--> working
                        ^                    |
                        +------ failure -----+           other calls fail at once meanwhile
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.metrics import TransferMetrics

log = logging.getLogger(__name__)


class StoreGuard:
    """One for each direction ("reading from x", "writing to x"), since a full store can still be read."""

    def __init__(self, what: str, backoff_s: float, clock: Callable[[], float], metrics: TransferMetrics) -> None:
        self._what = what
        self._backoff_s = backoff_s
        self._clock = clock
        self._metrics = metrics
        self._closed_until_s = float("-inf")
        self._is_failing = False
        self._is_tried = False

    @property
    def is_open(self) -> bool:
        return not self._is_tried and self._clock() >= self._closed_until_s

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Encloses every call of the store. Raises KVTransferError at once while the store is being left alone."""
        if not self.is_open:
            raise KVTransferError(f"{self._what} failed lately and is left alone")
        tries = self._is_failing
        self._is_tried |= tries
        try:
            yield
        except KVTransferError as error:
            self.failed(str(error))
            raise
        except TimeoutError as error:
            self.failed("no answer in time")
            raise KVTransferError(f"{self._what}: no answer in time") from error
        finally:
            self._is_tried &= not tries
        self._worked()

    def failed(self, why: str) -> None:
        self._metrics.failures[self._what.partition(" ")[0]] += 1
        self._closed_until_s = self._clock() + self._backoff_s
        if not self._is_failing:
            log.warning("%s failed (%s); left alone for %g s, then tried again", self._what, why, self._backoff_s)
        self._is_failing = True

    def _worked(self) -> None:
        """A call that began before the last failure proves nothing: it succeeds while the store is left alone."""
        if self._is_failing and self._clock() >= self._closed_until_s:
            log.info("%s works again", self._what)
            self._is_failing = False
