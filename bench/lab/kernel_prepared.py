"""A kernel with its tensors, ready to run."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prepared:
    run: Callable[[], object]
    check: Callable[[], None]  # after one run; AssertionError: the result is wrong
    amount: float  # bytes that must be read and written, or operations that must be done
    beside: Callable[[], object] | None = None  # the same by other means
