# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""sample on a GPU: a program a row, which reads the row a dozen times instead of sorting it once.

    survey      the best logit and the lowest
    top-k       the highest threshold at or above which there are k logits
    top-p       the highest threshold at or above which the weights come to p of all: the very same search
    draw        one number falls into the row of weights, in ascending token id

Weights are counted in integers, units of 2^-44 of the best one's. Sums of integers are exact: they grow from token to
token, and are the same in whatever order a machine adds them up; so no rounding ever draws a token that has no weight.
2^18 tokens of the best one's weight come to 2^62 units.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.sample import MAX_VOCABULARY, SamplingTensors, add_bias, tokens_seen

# Shapes: R rows  V vocabulary

_BLOCK_V = 8192  # 16 values a thread, all that the accumulators of a search leave room for
_UNITS = tl.constexpr(float(1 << 44))
_MIN_TEMPERATURE = tl.constexpr(1e-30)  # below it, the inverse could overflow; the best is all that is left long before


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """As in `kvasir.kernels.sample`. V is at most 2^18."""
    num_rows, vocabulary = logits.shape
    assert vocabulary <= MAX_VOCABULARY, f"{vocabulary} tokens: their weights could come to more than 63 bits"
    assert logits.stride(1) == 1, "the kernel reads rows of V"
    is_processed = any(asked is not None for asked in (params.bias, params.penalties, params.allowed))
    if is_processed:
        logits = process(logits, params)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    block_size = min(triton.next_power_of_2(vocabulary), _BLOCK_V)
    _sample_kernel[(num_rows,)](
        logits, tokens, params.temperature, params.top_k, params.top_p, params.min_p, params.seeds, params.positions,
        vocabulary, logits.stride(0), IS_PROCESSED=is_processed, BLOCK_V=block_size,
        num_warps=min(max(block_size // 512, 4), 16), enable_fp_fusion=False,  # a token weighs the same at every look
    )  # fmt: skip
    return tokens


def process(logits: Tensor, params: SamplingTensors) -> Tensor:
    """[R, V] -> [R, V] float32: with bias and penalties; -inf for what is not allowed, NaN for what is not finite"""
    num_rows, vocabulary = logits.shape
    processed = add_bias(logits, params.bias)
    penalties, allowed = params.penalties, params.allowed
    if penalties is None:
        seen = counts = repetition = presence = frequency = processed
    else:
        seen, counts = tokens_seen(penalties, logits.shape)
        seen = seen.view(torch.uint8)
        repetition, presence, frequency = penalties.repetition, penalties.presence, penalties.frequency
    block_size = min(triton.next_power_of_2(vocabulary), 2048)
    _process_kernel[(num_rows, triton.cdiv(vocabulary, block_size))](
        processed, seen, counts, repetition, presence, frequency, processed if allowed is None else allowed,
        vocabulary, 0 if allowed is None else allowed.stride(0),
        HAS_PENALTIES=penalties is not None, HAS_MASK=allowed is not None, BLOCK_V=block_size, num_warps=4,
    )  # fmt: skip
    return processed


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] int64, [R] int64 -> [R] float64 in [0, 1), as `kvasir.kernels.sample.uniform`, bit by bit"""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    _uniform_kernel[(triton.cdiv(len(seeds), 128),)](seeds, positions, out, len(seeds), BLOCK_R=128, num_warps=4)
    return out


@triton.jit
def _mix(x):
    """splitmix64's step and finaliser: [...] uint64 -> [...] uint64, all of it modulo 2^64"""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    position = position.to(tl.uint64, bitcast=True)
    bits = _mix(_mix(seed.to(tl.uint64, bitcast=True)) ^ (position * 0x9E3779B97F4A7C15)) >> 11
    return bits.to(tl.int64, bitcast=True).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _uniform_kernel(seeds_ptr, positions_ptr, out_ptr, num_rows, BLOCK_R: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    seeds, positions = tl.load(seeds_ptr + rows, mask=mask, other=0), tl.load(positions_ptr + rows, mask=mask, other=0)
    tl.store(out_ptr + rows, _uniform(seeds, positions), mask=mask)


@triton.jit
def _process_kernel(
    logits_ptr, seen_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, allowed_ptr, vocabulary,
    allowed_stride, HAS_PENALTIES: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = ids < vocabulary
    at = row * vocabulary + ids
    logits = tl.load(logits_ptr + at, mask=mask, other=0.0)
    is_finite = tl.abs(logits) < float("inf")
    if HAS_PENALTIES:
        repetition = tl.load(repetition_ptr + row)
        repeated = tl.where(logits > 0, logits / repetition, logits * repetition)
        logits = tl.where(tl.load(seen_ptr + at, mask=mask, other=0) != 0, repeated, logits)
        counts = tl.load(counts_ptr + at, mask=mask, other=0)
        penalty = tl.load(frequency_ptr + row) * counts.to(tl.float32)
        logits -= penalty + tl.where(counts > 0, tl.load(presence_ptr + row), 0.0)
    if HAS_MASK:
        words = tl.load(allowed_ptr + row * allowed_stride + ids // 32, mask=mask, other=0)
        logits = tl.where((words >> (ids % 32) & 1) != 0, logits, -float("inf"))
    tl.store(logits_ptr + at, tl.where(is_finite, logits, float("nan")), mask=mask)


@triton.jit
def _load_logits(logits_ptr, start, vocabulary, BLOCK_V: tl.constexpr):
    """Of the tokens from `start` on: [V] float32, -inf beyond the end"""
    ids = start + tl.arange(0, BLOCK_V)
    return tl.load(logits_ptr + ids, mask=ids < vocabulary, other=-float("inf")).to(tl.float32)


@triton.jit
def _survey(logits_ptr, vocabulary, IS_PROCESSED: tl.constexpr, BLOCK_V: tl.constexpr):
    """-> the best logit, its first id, the lowest logit above -inf, whether all are what logits may be"""
    best = tl.full([BLOCK_V], -float("inf"), tl.float32)
    best_id = tl.zeros([BLOCK_V], tl.int32)
    lowest = tl.full([BLOCK_V], float("inf"), tl.float32)
    num_bad = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocabulary, BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        logits = _load_logits(logits_ptr, start, vocabulary, BLOCK_V)
        best_id = tl.where(logits > best, ids, best_id)  # the first of those that tie
        best = tl.where(logits > best, logits, best)
        is_finite = tl.abs(logits) < float("inf")
        lowest = tl.where(is_finite & (logits < lowest), logits, lowest)
        if IS_PROCESSED:
            is_finite |= logits == -float("inf")
        num_bad += tl.where(is_finite | (ids >= vocabulary), 0, 1)
    highest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == highest, best_id, vocabulary), axis=0)
    return highest, first, tl.min(lowest, axis=0), tl.sum(num_bad, axis=0) == 0


@triton.jit
def _units_of(logits, best, inverse_temperature, min_p):
    """How much each token weighs, [V] int64; nothing where its weight beside the best one's is below min_p"""
    weights = tl.exp((logits - best) * inverse_temperature)
    return (tl.where(weights >= min_p, weights, 0.0) * _UNITS).to(tl.int64)


@triton.jit
def _threshold(
    logits_ptr, vocabulary, lowest, best, inverse_temperature, target, BY_WEIGHT: tl.constexpr, BLOCK_V: tl.constexpr
):
    """The highest logit such that those at or above it come to `target`, by number or by weight; `lowest` if none.

    Bisection between two logits of the row; each look at the row takes the bounds to logits that are there, so it is
    over when none is left between them: after about log2(range / distance between neighbours) looks.

        lowest ........ x . x .... middle .. x ... x x ...... highest
                            ^ highest, if            ^ lowest, if the target is reached
                              it is not                from here on up
    """
    highest = best
    while lowest < highest:
        middle = lowest + (highest - lowest) * 0.5
        middle = tl.where(middle > lowest, middle, highest)  # neighbours: nothing lies between
        reached = tl.zeros([BLOCK_V], tl.int64)
        above = tl.full([BLOCK_V], float("inf"), tl.float32)
        below = tl.full([BLOCK_V], -float("inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK_V):
            logits = _load_logits(logits_ptr, start, vocabulary, BLOCK_V)
            units = tl.full([BLOCK_V], 1, tl.int64)
            if BY_WEIGHT:
                units = _units_of(logits, best, inverse_temperature, 0.0)
            reached += tl.where(logits >= middle, units, 0)
            above = tl.where((logits >= middle) & (logits < above), logits, above)
            below = tl.where((logits < middle) & (logits > below), logits, below)
        if tl.sum(reached, axis=0) >= target:
            lowest = tl.min(above, axis=0)
        else:
            highest = tl.max(below, axis=0)
    return lowest


@triton.jit
def _units_between(
    logits_ptr, start, end, vocabulary, threshold, best, inverse_temperature, min_p, BLOCK_V: tl.constexpr
):
    """Of the tokens [start, end) at or above the threshold, all together"""
    total = tl.zeros([BLOCK_V], tl.int64)
    for first in range(start, end, BLOCK_V):
        logits = _load_logits(logits_ptr, first, vocabulary, BLOCK_V)
        total += tl.where(logits >= threshold, _units_of(logits, best, inverse_temperature, min_p), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _draw(logits_ptr, vocabulary, threshold, best, inverse_temperature, min_p, number, BLOCK_V: tl.constexpr):
    """The first token at which the sum of weights exceeds number in [0, 1) times all of them"""
    total = _units_between(logits_ptr, 0, vocabulary, vocabulary, threshold, best, inverse_temperature, min_p, BLOCK_V)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    start = 0
    before = tl.cast(0, tl.int64)
    here = _units_between(
        logits_ptr, start, start + BLOCK_V, vocabulary, threshold, best, inverse_temperature, min_p, BLOCK_V
    )
    while (before + here <= target) & (start + BLOCK_V < vocabulary):
        before += here
        start += BLOCK_V
        here = _units_between(
            logits_ptr, start, start + BLOCK_V, vocabulary, threshold, best, inverse_temperature, min_p, BLOCK_V
        )
    logits = _load_logits(logits_ptr, start, vocabulary, BLOCK_V)
    units = tl.where(logits >= threshold, _units_of(logits, best, inverse_temperature, min_p), 0)
    return start + tl.sum((before + tl.cumsum(units, axis=0) <= target).to(tl.int32), axis=0)


@triton.jit
def _sample_kernel(
    logits_ptr, tokens_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    vocabulary, row_stride, IS_PROCESSED: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    temperature = tl.load(temperature_ptr + row)
    best, token, threshold, is_sound = _survey(logits_ptr, vocabulary, IS_PROCESSED, BLOCK_V)
    if (temperature > 0) & is_sound:
        inverse = 1.0 / tl.maximum(temperature, _MIN_TEMPERATURE)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if (top_k > 0) & (top_k < vocabulary):
            threshold = _threshold(
                logits_ptr, vocabulary, threshold, best, inverse, top_k, BY_WEIGHT=False, BLOCK_V=BLOCK_V
            )
        if top_p < 1:
            all_units = _units_between(logits_ptr, 0, vocabulary, vocabulary, threshold, best, inverse, 0.0, BLOCK_V)
            target = tl.ceil(top_p.to(tl.float64) * all_units.to(tl.float64)).to(tl.int64)
            threshold = _threshold(
                logits_ptr, vocabulary, threshold, best, inverse, target, BY_WEIGHT=True, BLOCK_V=BLOCK_V
            )
        number = _uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        token = _draw(logits_ptr, vocabulary, threshold, best, inverse, min_p, number, BLOCK_V)
    tl.store(tokens_ptr + row, tl.where(is_sound, token, -1).to(tl.int64))
