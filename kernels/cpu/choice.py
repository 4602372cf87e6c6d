"""The loop that chooses a token from each row of logits: the best, and the one that a number in [0, 1) points at.

Rows to which something is done first are copied, and changed in the copy.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.candidates import draw_from_some, largest_in
from kvasir.kernels.cpu.compiling import carray, compiled, loop, strict
from kvasir.kernels.cpu.simd import float32_array, float64_array, int64_array, next_piece, uint8_array
from kvasir.kernels.cpu.token_weights import steepness, sum_parts, token_at

# Shapes: R rows  V vocabulary  P parts of a row  E entries of all rows' changes


@compiled
def _is_finite(row: Any) -> Any:
    total = np.float32(0)
    for i in range(len(row)):
        total += row[i] * np.float32(0)  # NaN, if it is infinite or NaN
    return total == 0


@strict
def _changed(row: Any, change: Any, strengths: Any, tokens: Any, amounts: Any) -> Any:
    """A copy. change: the row's first entry, the first that is no bias, the end, and where its mask is or 0"""
    row = row.copy()
    for e in range(change[0], change[1]):
        row[tokens[e]] += np.float32(amounts[e])
    repetition, presence, frequency = strengths
    for e in range(change[1], change[2]):
        logit = np.float64(row[tokens[e]])
        logit = logit / repetition if logit > 0 else logit * repetition
        if amounts[e] > 0:
            logit -= presence + frequency * amounts[e]
        row[tokens[e]] = logit
    if change[3]:
        allowed = uint8_array(change[3], (len(row),))
        for i in range(len(row)):
            row[i] = row[i] if allowed[i] else -np.inf
    return row


@compiled
def _choose(
    counter: Any, logits: Any, settings: Any, changes: Any, tokens: Any, amounts: Any, sums: Any, tops: Any,
    best: Any, drawn: Any,
) -> None:  # fmt: skip
    while True:
        r = next_piece(counter)
        if r >= len(logits):
            return
        row, change = logits[r], changes[r]
        if not _is_finite(row):
            best[r] = drawn[r] = -1
            continue
        if change[0] < change[2] or change[3]:
            row = _changed(row, change, settings[r, 5:], tokens, amounts)
        largest, at = largest_in(row, 0, len(row)), 0
        while at + 1 < len(row) and row[at] != largest:
            at += 1
        best[r] = drawn[r] = at
        temperature, u, top_k, top_p, min_p = settings[r, :5]
        if temperature <= 0 or np.isinf(largest):
            continue
        if 0 < top_k < len(row) or top_p < 1 or min_p > 0:
            drawn[r] = draw_from_some(row, largest, settings[r], sums[r], tops[r])
        else:
            scale = steepness(temperature)
            target = u * sum_parts(row, largest, scale, sums[r])
            drawn[r] = token_at(row, largest, at, scale, sums[r], target)


@loop
def choose(arguments: Any) -> None:
    """[_, R, V, logits [R, V], settings [R, 8] float64, changes [R, 4], E, tokens [E], amounts [E] float64,
    P, sums [R, P] float64, tops [R, P] float32, best [R], drawn [R]]"""
    a = carray(arguments, 14)
    rows, entries, parts = (a[1],), (a[6],), (a[1], a[9])
    _choose(
        arguments, float32_array(a[3], (a[1], a[2])), float64_array(a[4], (a[1], 8)), int64_array(a[5], (a[1], 4)),
        int64_array(a[7], entries), float64_array(a[8], entries), float64_array(a[10], parts),
        float32_array(a[11], parts), int64_array(a[12], rows), int64_array(a[13], rows),
    )  # fmt: skip
