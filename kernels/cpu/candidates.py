"""A draw where top-k, top-p or min-p leave tokens out: those that may be left are collected first, few as a rule."""

import math
from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import compiled
from kvasir.kernels.cpu.simd import LANES, largest_of
from kvasir.kernels.cpu.token_weights import PART, steepness, sum_parts, weight

# Shapes: V vocabulary  P parts of a row  N tokens that may be left
LOWEST = float(np.finfo(np.float32).min)  # -inf is what must not come
_FIRST_DEPTH, _DEEPEST = 6.0, 700.0  # below the best, in units of the temperature: e ** -700 is no weight at all


@compiled
def largest_in(row: Any, start: Any, end: Any) -> Any:
    """Of row[start:end]. NaN are passed over."""
    whole = start + (end - start) // LANES * LANES
    largest = largest_of(row.ctypes.data + start * 4, whole - start)
    for i in range(whole, end):
        largest = max(largest, row[i])
    return largest


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
def _candidates(row: Any, tops: Any, cut: Any, largest: Any, scale: Any) -> Any:
    """Those whose logits are at least `cut`: tokens [N] in ascending order, logits [N] and weights [N] float64"""
    count = _count_from(row, tops, cut)
    tokens, logits, weights = np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float64)
    count = 0
    for p in range(len(tops)):
        if tops[p] >= cut:
            for i in range(p * PART, min((p + 1) * PART, len(row))):
                if row[i] >= cut:
                    tokens[count], logits[count] = i, row[i]
                    weights[count] = weight((np.float64(row[i]) - largest) * scale)
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
def _best_k(row: Any, tops: Any, k: Any, largest: Any, scale: Any) -> Any:
    """Candidates: the best `k`, and all that tie with the last of them; all, if there are no more."""
    none = np.empty(0, np.float64)
    cut = np.float64(LOWEST)
    if k <= len(tops):  # the k-th best cannot be less than the k-th best of the parts' largest
        cut = max(cut, np.float64(_edge(tops, none, k)))
    tokens, logits, weights = _candidates(row, tops, cut, largest, scale)
    count = _keep(tokens, logits, weights, _edge(logits, none, k), 0.0)
    return tokens[:count], logits[:count], weights[:count]


@compiled
def _down_to(row: Any, tops: Any, target: Any, largest: Any, scale: Any) -> Any:
    """Candidates: the best ones, as many as it takes for weights of `target`, and some more."""
    depth = np.float64(_FIRST_DEPTH)
    while True:
        cut = max(largest - depth / scale, np.float64(LOWEST))
        found = _candidates(row, tops, cut, largest, scale)
        if depth > _DEEPEST or _sum(found[2]) >= target:
            return found
        depth *= 2


@compiled
def draw_from_some(row: Any, largest: Any, setting: Any, sums: Any, tops: Any) -> Any:
    """setting: temperature, u, top_k, top_p, min_p"""
    temperature, u, top_k, top_p, min_p = setting[0], setting[1], setting[2], setting[3], setting[4]
    scale = steepness(temperature)
    for p in range(len(tops)):
        tops[p] = largest_in(row, p * PART, min((p + 1) * PART, len(row)))
    if 0 < top_k < len(row):
        tokens, logits, weights = _best_k(row, tops, top_k, largest, scale)
        target = top_p * _sum(weights)
    elif top_p < 1:
        target = top_p * sum_parts(row, largest, scale, sums)
        tokens, logits, weights = _down_to(row, tops, target, largest, scale)
    else:
        target = 0.0
        cut = largest + (math.log(min_p) - 0.01) / scale  # what is on the edge is decided below
        tokens, logits, weights = _candidates(row, tops, max(cut, np.float64(LOWEST)), largest, scale)
    edge = _edge(logits, weights, target) if top_p < 1 else np.float32(LOWEST)
    count = _keep(tokens, logits, weights, edge, min_p)  # the best weighs 1
    target, total, last = u * _sum(weights[:count]), 0.0, 0
    for i in range(count):
        total += weights[i]
        if total > target:
            return tokens[i]
        if weights[i] > 0:
            last = i
    return tokens[last]
