"""The loop that chooses a token from each row of logits: the best, and the one that a number in [0, 1) points at."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, compiled, loop
from kvasir.kernels.cpu.simd import LANES, exp2, float32_array, float64_array, int64_array, largest_of, next_piece

# Shapes: R rows  V vocabulary  P parts of a row
PART = 64  # tokens whose weights are summed in float32; the sums of parts are summed in float64


@compiled
def _largest(row: Any) -> Any:
    """NaN are passed over."""
    whole = len(row) // LANES * LANES
    largest = largest_of(row.ctypes.data, whole)
    for i in range(whole, len(row)):
        largest = max(largest, row[i])
    return largest


@compiled
def _is_finite(row: Any) -> Any:
    total = np.float32(0)
    for i in range(len(row)):
        total += row[i] * np.float32(0)  # NaN, if it is infinite or NaN
    return total == 0


@compiled
def _sum_parts(row: Any, largest: Any, scale: Any, sums: Any) -> Any:
    """sums [P] become those of the weights 2 ** ((logit - largest) * scale); their total"""
    total = np.float64(0)
    for p in range(len(sums)):
        part = np.float32(0)
        for i in range(p * PART, min((p + 1) * PART, len(row))):
            part += exp2((row[i] - largest) * scale)
        sums[p] = part
        total += part
    return total


@compiled
def _token_at(row: Any, largest: Any, scale: Any, sums: Any, target: Any) -> Any:
    """The first token up to which the weights come to more than `target`; the last of any weight if they never do."""
    before, last = np.float64(0), 0
    for p in range(len(sums)):
        if before + sums[p] <= target and p + 1 < len(sums):
            before += sums[p]
            continue
        for i in range(p * PART, min((p + 1) * PART, len(row))):
            weight = np.float64(exp2((row[i] - largest) * scale))
            before += weight
            if before > target:
                return i
            if weight > 0:
                last = i
    return last


@compiled
def _choose(counter: Any, logits: Any, scales: Any, us: Any, sums: Any, best: Any, drawn: Any) -> None:
    while True:
        r = next_piece(counter)
        if r >= len(logits):
            return
        row = logits[r]
        if not _is_finite(row):
            best[r] = -1
            continue
        largest, at = _largest(row), 0
        while row[at] != largest:
            at += 1
        best[r] = drawn[r] = at
        if scales[r] > 0:
            total = _sum_parts(row, largest, scales[r], sums[r])
            drawn[r] = _token_at(row, largest, scales[r], sums[r], us[r] * total)


@loop
def choose(arguments: Any) -> None:
    """[_, R, V, logits [R, V], scales [R] float32, us [R] float64, P, sums [R, P] float64, best [R], drawn [R]]"""
    a = carray(arguments, 10)
    rows = (a[1],)
    _choose(
        arguments, float32_array(a[3], (a[1], a[2])), float32_array(a[4], rows), float64_array(a[5], rows),
        float64_array(a[7], (a[1], a[6])), int64_array(a[8], rows), int64_array(a[9], rows),
    )  # fmt: skip
