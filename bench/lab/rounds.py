"""Rounds in which all that is compared takes its turn, so that whatever else the machine does hits all of it."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvasir.bench.lab.machine import Quiet

K = TypeVar("K")
T = TypeVar("T")


def in_turns(
    works: Mapping[K, Callable[[], T]],
    num_rounds: int,
    quiet: Quiet | None = None,
    describe: Callable[[K, T], str] | None = None,
) -> dict[K, list[T]]:
    """What each gave, one a round. A round that does not count comes first: whatever is done once is done in it.

    Each round begins with another, so that nobody always comes after the same one. `describe`: a line on stderr.
    """
    found: dict[K, list[T]] = {name: [] for name in works}
    turns = list(works.items())
    for number in range(1 + num_rounds):
        if quiet is not None:
            quiet.look()
        start = number % len(turns)
        for name, work in (*turns[start:], *turns[:start]):
            found[name].append(work())
            if describe is not None:
                print(f"round {number}  {describe(name, found[name][-1])}", file=sys.stderr, flush=True)
    return {name: given[1:] for name, given in found.items()}


def seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Of one to the other in the same round, the median."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))
