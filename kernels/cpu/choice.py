"""The loop that chooses a token from each row of logits: the best, and the one that a number in [0, 1) points at.

Where all tokens may come, their weights are summed in float32 a part at a time. Where top-k, top-p or min-p leave some
out, those that may be left are collected first, few as a rule; the rest is done with them alone, in float64.
"""

import math
from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, compiled, loop
from kvasir.kernels.cpu.simd import LANES, exp2, float32_array, float64_array, int64_array, largest_of, next_piece

# Shapes: R rows  V vocabulary  P parts of a row  N tokens that may be left
PART = 64  # tokens whose weights are summed in float32; the sums of parts are summed in float64
_LOG2_E = math.log2(math.e)
_STEEPEST = 1e30  # of what logits are multiplied by: a float32, with room for the product
_NO_WEIGHT = -126  # what exp2 makes of this and of all below is next to nothing, but something
_LOWEST = float(np.finfo(np.float32).min)  # -inf is what must not come
_FIRST_DEPTH, _DEEPEST = 6.0, 700.0  # below the best, in units of the temperature: e ** -700 is no weight at all


@compiled
def _largest(row: Any, start: Any, end: Any) -> Any:
    """Of row[start:end]. NaN are passed over."""
    whole = start + (end - start) // LANES * LANES
    largest = largest_of(row.ctypes.data + start * 4, whole - start)
    for i in range(whole, end):
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
def _token_at(row: Any, largest: Any, best: Any, scale: Any, sums: Any, target: Any) -> Any:
    """The first token up to which the weights come to more than `target`; the last of any weight if they never do."""
    before, last = np.float64(0), best
    for p in range(len(sums)):
        if before + sums[p] <= target and p + 1 < len(sums):
            before += sums[p]
            continue
        for i in range(p * PART, min((p + 1) * PART, len(row))):
            exponent = (row[i] - largest) * scale
            if exponent <= _NO_WEIGHT:
                continue
            before += np.float64(exp2(exponent))
            if before > target:
                return i
            last = i
    return last


@compiled
def _count_from(row: Any, tops: Any, cut: Any) -> Any:
    """Of logits that are at least `cut`. tops [P]: the largest of each part"""
    count = 0
    for p in range(len(tops)):
        if tops[p] >= cut:
            for i in range(p * PART, min((p + 1) * PART, len(row))):
                count += row[i] >= cut
    return count


@compiled
def _candidates(row: Any, tops: Any, cut: Any, largest: Any, temperature: Any) -> Any:
    """Those whose logits are at least `cut`: tokens [N] in ascending order, logits [N] and weights [N] float64"""
    count = _count_from(row, tops, cut)
    tokens, logits, weights = np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float64)
    count = 0
    for p in range(len(tops)):
        if tops[p] >= cut:
            for i in range(p * PART, min((p + 1) * PART, len(row))):
                if row[i] >= cut:
                    tokens[count], logits[count] = i, row[i]
                    weights[count] = math.exp((np.float64(row[i]) - largest) / temperature)
                    count += 1
    return tokens, logits, weights


@compiled
def _sum(values: Any) -> Any:
    total = np.float64(0)
    for i in range(len(values)):
        total += values[i]
    return total


@compiled
def _edge(all_logits: Any, all_masses: Any, target: Any) -> Any:
    """The largest logit from which on, upwards, the masses come to `target`; the smallest if all are not enough.

    Equal logits count together. Masses that are empty: 1 each.
    """
    logits, masses = np.empty(len(all_logits), np.float32), np.ones(len(all_logits), np.float64)
    for i in range(len(logits)):
        logits[i] = all_logits[i]
    for i in range(len(all_masses)):
        masses[i] = all_masses[i]
    first, end, before = 0, len(logits), 0.0
    while True:
        pivot = logits[(first + end) // 2]
        equal, at, below = first, first, end  # first..: larger than the pivot, equal..: equal, below..: smaller
        larger_mass, equal_mass = 0.0, 0.0
        while at < below:
            logit, mass = logits[at], masses[at]
            if logit > pivot:
                larger_mass += mass
                logits[at], masses[at] = logits[equal], masses[equal]
                logits[equal], masses[equal] = logit, mass
                equal += 1
                at += 1
            elif logit == pivot:
                equal_mass += mass
                at += 1
            else:
                below -= 1
                logits[at], masses[at] = logits[below], masses[below]
                logits[below], masses[below] = logit, mass
        if equal > first and before + larger_mass >= target:
            end = equal
        elif below == end or before + larger_mass + equal_mass >= target:
            return pivot
        else:
            before += larger_mass + equal_mass
            first = below


@compiled
def _keep(tokens: Any, logits: Any, weights: Any, edge: Any, min_weight: Any) -> Any:
    """Those from the edge on, in the same order at the front; how many they are."""
    count = 0
    for i in range(len(tokens)):
        if logits[i] >= edge and weights[i] >= min_weight:
            tokens[count], logits[count], weights[count] = tokens[i], logits[i], weights[i]
            count += 1
    return count


@compiled
def _best_k(row: Any, tops: Any, k: Any, largest: Any, temperature: Any) -> Any:
    """Candidates: the best `k`, and all that tie with the last of them; all, if there are no more."""
    none = np.empty(0, np.float64)
    cut = np.float64(_LOWEST)
    if k <= len(tops):  # the k-th best cannot be less than the k-th best of the parts' largest
        cut = max(cut, np.float64(_edge(tops, none, k)))
    tokens, logits, weights = _candidates(row, tops, cut, largest, temperature)
    count = _keep(tokens, logits, weights, _edge(logits, none, k), 0.0)
    return tokens[:count], logits[:count], weights[:count]


@compiled
def _down_to(row: Any, tops: Any, target: Any, largest: Any, temperature: Any) -> Any:
    """Candidates: the best ones, as many as it takes for weights of `target`, and some more."""
    depth = np.float64(_FIRST_DEPTH)
    while True:
        cut = max(np.float64(largest) - depth * temperature, np.float64(_LOWEST))
        found = _candidates(row, tops, cut, largest, temperature)
        if depth > _DEEPEST or _sum(found[2]) >= target:
            return found
        depth *= 2


@compiled
def _draw_from_some(row: Any, largest: Any, setting: Any, sums: Any, tops: Any) -> Any:
    """setting: temperature, u, top_k, top_p, min_p"""
    temperature, u, top_k, top_p, min_p = setting[0], setting[1], setting[2], setting[3], setting[4]
    for p in range(len(tops)):
        tops[p] = _largest(row, p * PART, min((p + 1) * PART, len(row)))
    if 0 < top_k < len(row):
        tokens, logits, weights = _best_k(row, tops, top_k, largest, temperature)
        target = top_p * _sum(weights)
    elif top_p < 1:
        target = top_p * _sum_parts(row, largest, np.float32(min(_LOG2_E / temperature, _STEEPEST)), sums)
        tokens, logits, weights = _down_to(row, tops, target, largest, temperature)
    else:
        target = 0.0
        cut = largest + (math.log(min_p) - 0.01) * temperature  # what is on the edge is decided below
        tokens, logits, weights = _candidates(row, tops, max(cut, np.float64(_LOWEST)), largest, temperature)
    edge = _edge(logits, weights, target) if top_p < 1 else np.float32(_LOWEST)
    count = _keep(tokens, logits, weights, edge, min_p)  # the best weighs 1
    target, total, last = u * _sum(weights[:count]), 0.0, 0
    for i in range(count):
        total += weights[i]
        if total > target:
            return tokens[i]
        if weights[i] > 0:
            last = i
    return tokens[last]


@compiled
def _choose(
    counter: Any, logits: Any, may_hold_bans: Any, settings: Any, sums: Any, tops: Any, best: Any, drawn: Any
) -> None:
    while True:
        r = next_piece(counter)
        if r >= len(logits):
            return
        row = logits[r]
        if not may_hold_bans and not _is_finite(row):
            best[r] = -1
            continue
        largest, at = _largest(row, 0, len(row)), 0
        while at + 1 < len(row) and row[at] != largest:
            at += 1
        best[r] = drawn[r] = at
        temperature, u, top_k, top_p, min_p = settings[r]
        if temperature <= 0 or largest == -np.inf:
            continue
        if 0 < top_k < len(row) or top_p < 1 or min_p > 0:
            drawn[r] = _draw_from_some(row, largest, settings[r], sums[r], tops[r])
        else:
            scale = np.float32(min(_LOG2_E / temperature, _STEEPEST))
            target = u * _sum_parts(row, largest, scale, sums[r])
            drawn[r] = _token_at(row, largest, at, scale, sums[r], target)


@loop
def choose(arguments: Any) -> None:
    """[_, R, V, logits [R, V], may_hold_bans, settings [R, 5] float64, P, sums [R, P] float64, tops [R, P] float32,
    best [R], drawn [R]]"""
    a = carray(arguments, 11)
    rows, parts = (a[1],), (a[1], a[6])
    _choose(
        arguments, float32_array(a[3], (a[1], a[2])), a[4] != 0, float64_array(a[5], (a[1], 5)),
        float64_array(a[7], parts), float32_array(a[8], parts), int64_array(a[9], rows), int64_array(a[10], rows),
    )  # fmt: skip
