"""Attention of one new token a sequence over the paged cache, block by block in place, with a running softmax."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.kv_rows import address_of, cache_shape, rows_at, scale_of
from kvasir.kernels.cpu.simd import (
    TILE_COLUMNS,
    TILE_ROWS,
    carray,
    compiled,
    exp2,
    float32_array,
    float32_of,
    int8_array,
    int32_array,
    lazy_loop,
    loop,
    multiply_tile,
    next_piece,
    padded,
    prefetch,
    soft_cap,
    uint16_array,
    widened,
)

# Shapes: S sequences  B tokens a block  H query heads  K KV heads  G = H / K  D head dim
#   R = G, padded to whole tiles of rows     W = D, padded to whole tiles of columns


@compiled
def _score_block(query: Any, num_rows: Any, keys: Any, row_bytes: Any, next_keys: Any, next_values: Any,
                 scores: Any) -> None:  # fmt: skip
    """scores[r, i] = query[r] . keys[i]. Meanwhile the next block comes in from memory."""
    block_size, head_dim = keys.shape
    for i in range(block_size):
        for line in range(0, row_bytes, 64):
            prefetch(next_keys + i * row_bytes + line)
            prefetch(next_values + i * row_bytes + line)
        scale = scale_of(keys, i)
        for r in range(num_rows):
            score = np.float32(0)
            for d in range(head_dim):
                score += query[r, d] * widened(keys[i, d])
            scores[r, i] = score * scale


@compiled
def _add_values(scores: Any, num_rows: Any, count: Any, values: Any, sums: Any) -> None:
    """sums[r] += scores[r] @ values of the block's first `count` tokens; their scales are multiplied into the scores.

    What lies behind them is an earlier owner's, perhaps NaN, and must not even be multiplied by 0.
    """
    block_size, head_dim = values.shape
    in_tiles = head_dim // TILE_COLUMNS * TILE_COLUMNS
    for r in range(num_rows):
        for i in range(count):
            scores[r, i] *= scale_of(values, i)
    for r in range(0, num_rows, TILE_ROWS):
        for d in range(0, in_tiles, TILE_COLUMNS):
            multiply_tile(
                scores.ctypes.data + r * scores.strides[0], block_size,
                values, values.ctypes.data + d * values.itemsize, head_dim,
                sums.ctypes.data + r * sums.strides[0] + 4 * d, head_dim, count,
            )  # fmt: skip
    if in_tiles == head_dim:
        return
    for r in range(num_rows):
        for i in range(count):
            for d in range(in_tiles, head_dim):
                sums[r, d] += scores[r, i] * widened(values[i, d])


@compiled
def _softmax(num_rows: Any, scores: Any, low: Any, high: Any, state: Any, sums: Any) -> None:
    """As in prefill: scores -> weights; state[r] = [maximum so far, sum so far]; sums follow the maximum."""
    for r in range(num_rows):
        highest = state[r, 0]
        for i in range(low, high):
            highest = max(highest, scores[r, i])
        if highest != state[r, 0]:
            rescale = exp2(state[r, 0] - highest)
            state[r, 0] = highest
            state[r, 1] *= rescale
            for d in range(sums.shape[1]):
                sums[r, d] *= rescale
        total = np.float32(0)
        for i in range(scores.shape[1]):
            weight = exp2(scores[r, i] - highest)
            if i < low or i >= high:
                weight = np.float32(0)
            scores[r, i] = weight
            total += weight
        state[r, 1] += total


@compiled
def _work(counter: Any, query: Any, num_heads: Any, cache: Any, shape: Any, layer: Any, block_tables: Any,
          seq_lens: Any, scale: Any, cap: Any, window: Any, out: Any) -> None:  # fmt: skip
    num_seqs = len(seq_lens)
    num_layers, num_kv_heads, block_size, head_dim = shape
    layout, row_bytes = (num_layers, num_kv_heads), cache.strides[0] // block_size
    group = num_heads // num_kv_heads
    rows = padded(group, TILE_ROWS)
    scaled = np.zeros((rows, head_dim), np.float32)
    scores = np.zeros((rows, block_size), np.float32)
    sums = np.zeros((rows, head_dim), np.float32)
    state = np.zeros((rows, 2), np.float32)
    while True:
        piece = next_piece(counter)
        s, head = piece // num_kv_heads, piece % num_kv_heads
        if s >= num_seqs:
            return
        for r in range(group):
            for d in range(head_dim):
                scaled[r, d] = query[s, (head * group + r) * head_dim + d] * scale
        sums[:] = 0
        state[:, 0] = -np.inf
        state[:, 1] = 0
        end = seq_lens[s]
        first_seen = max(0, end - window) if window > 0 else 0
        last = (end - 1) // block_size
        for index in range(first_seen // block_size, last + 1):
            first = index * block_size
            block, upcoming = block_tables[s, index], block_tables[s, min(index + 1, last)]
            keys = rows_at(cache, address_of(cache, layout, block, layer, 0, head), block_size, head_dim)
            values = rows_at(cache, address_of(cache, layout, block, layer, 1, head), block_size, head_dim)
            next_keys = address_of(cache, layout, upcoming, layer, 0, head)
            next_values = address_of(cache, layout, upcoming, layer, 1, head)
            _score_block(scaled, group, keys, row_bytes, next_keys, next_values, scores)
            if cap > 0:
                soft_cap(scores, group, cap)
            count = min(block_size, end - first)
            _softmax(group, scores, max(0, first_seen - first), count, state, sums)
            _add_values(scores, group, count, values, sums)
        for r in range(group):
            weight = np.float32(1) / state[r, 1] if end > 0 else np.float32(0)
            for d in range(head_dim):
                out[s, (head * group + r) * head_dim + d] = sums[r, d] * weight


@compiled
def _attend(arguments: Any, a: Any, cache: Any) -> None:
    num_seqs, num_heads, head_dim = a[2], a[4], a[11]
    _work(
        arguments,
        float32_array(a[1], (num_seqs, a[3])),
        num_heads,
        cache,
        (a[7], a[8], a[9], head_dim),
        a[12],
        int32_array(a[13], (num_seqs, a[14])),
        int32_array(a[15], (num_seqs,)),
        float32_of(a[16]),
        float32_of(a[17]),
        a[18],
        float32_array(a[19], (num_seqs, num_heads * head_dim)),
    )


@loop
def over_float32(arguments: Any) -> None:
    a = carray(arguments, 20)
    _attend(arguments, a, float32_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_float16(arguments: Any) -> None:
    a = carray(arguments, 20)
    _attend(arguments, a, uint16_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_int8(arguments: Any) -> None:
    a = carray(arguments, 20)
    _attend(arguments, a, int8_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))
