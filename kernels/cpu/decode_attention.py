"""Attention of one new token a sequence over the paged cache, read in place.

A piece of work is one KV head of one split of a sequence (`decode_splits`). Of a piece all scores are computed first,
while its values come in from memory, and then all weighted values, while the next piece's keys come in.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.attention_tile import VECTORS, add_columns, add_vector, score_keys
from kvasir.kernels.cpu.compiling import carray, compiled, lazy_loop, loop
from kvasir.kernels.cpu.decode_splits import compiled_split_tokens, locate, splits_of
from kvasir.kernels.cpu.kv_rows import address_of, cache_shape, rows_at, scale_of
from kvasir.kernels.cpu.simd import (
    LANES,
    TILE_ROWS,
    exp2,
    float32_array,
    float32_of,
    int8_array,
    int32_array,
    largest_of,
    next_piece,
    padded,
    prefetch,
    soft_cap,
    uint16_array,
    widened,
)

# Shapes: S sequences  B tokens a block  H query heads  K KV heads  G = H / K  D head dim
#   C tokens of a split, at most     P splits of a sequence, at most
_LINE_BYTES = 64


@compiled
def _list_keys(cache: Any, shape: Any, layer: Any, block_tables: Any, place: Any, rows: Any) -> None:
    """The addresses of a piece's keys; behind them the last again."""
    num_layers, num_kv_heads, block_size, head_dim = shape
    s, _, _, head, start, end = place
    row_bytes = head_dim * cache.itemsize
    address = cache.ctypes.data
    i = 0
    while start + i < end:
        block, offset = block_tables[s, (start + i) // block_size], (start + i) % block_size
        keys = address_of(cache, (num_layers, num_kv_heads), block, layer, 0, head)
        for k in range(offset, min(block_size, offset + end - start - i)):
            address = keys + k * row_bytes
            rows[i] = address
            i += 1
    rows[i:] = address


@compiled
def _fetch(rows: Any, first: Any, row_bytes: Any) -> None:
    """The LANES rows from `first` on, by their addresses"""
    for i in range(first, first + LANES):
        for line in range(0, row_bytes, _LINE_BYTES):
            prefetch(rows[i] + line)


@compiled
def _scale(cache: Any, shape: Any, layer: Any, block_tables: Any, place: Any, which: Any, scores: Any) -> None:
    """scores[r, i] *= the scale of the piece's i-th key, or value"""
    num_layers, num_kv_heads, block_size, head_dim = shape
    s, _, _, head, start, end = place
    i = 0
    while start + i < end:
        block, offset = block_tables[s, (start + i) // block_size], (start + i) % block_size
        address = address_of(cache, (num_layers, num_kv_heads), block, layer, which, head)
        rows = rows_at(cache, address, block_size, head_dim)
        count = min(block_size - offset, end - start - i)
        for r in range(scores.shape[0]):
            for k in range(count):
                scores[r, i + k] *= scale_of(rows, offset + k)
        i += count


@compiled
def _score(query: Any, cache: Any, width: Any, keys: Any, values: Any, scores: Any) -> None:
    """scores [G, C] = query [G, D] @ the first `width` keys.T, by their addresses. Meanwhile the values come in."""
    group, head_dim = query.shape
    for first in range(0, width, LANES):
        _fetch(values, first, head_dim * cache.itemsize)
        for r in range(0, group, TILE_ROWS):
            score_keys(
                query.ctypes.data + r * query.strides[0], head_dim, min(TILE_ROWS, group - r), cache,
                keys.ctypes.data + 8 * first, head_dim,
                scores.ctypes.data + r * scores.strides[0] + 4 * first, scores.strides[0] // 4,
            )  # fmt: skip
    in_vectors = head_dim // LANES * LANES
    if in_vectors < head_dim:
        for i in range(width):
            key = rows_at(cache, keys[i], 1, head_dim)
            for r in range(group):
                for d in range(in_vectors, head_dim):
                    scores[r, i] += query[r, d] * widened(key[0, d])


@compiled
def _softmax(count: Any, width: Any, scores: Any, state: Any) -> None:
    """scores [G, C] -> weights of the first `count` tokens; state[r] = [maximum, sum]

    width: `count`, padded to whole vectors
    """
    for r in range(scores.shape[0]):
        row = scores[r]
        row[count:width] = -np.inf
        highest = largest_of(row.ctypes.data, width)
        total = np.float32(0)
        for i in range(width):
            weight = exp2(row[i] - highest)  # of -inf no more than a sum of 1 loses
            row[i] = weight
            total += weight
        state[r, 0] = highest
        state[r, 1] = total


@compiled
def _add_values(count: Any, scores: Any, cache: Any, values: Any, upcoming: Any, sums: Any) -> None:
    """sums [G, D] = scores @ the first `count` values, by their addresses. Meanwhile the next keys come in.

    What lies behind them is an earlier owner's, perhaps NaN, and must not even be multiplied by 0.
    """
    group, head_dim = sums.shape
    in_columns = head_dim // (VECTORS * LANES) * VECTORS * LANES
    in_vectors = head_dim // LANES * LANES
    sums[:] = 0
    for r in range(0, group, TILE_ROWS):
        num_rows = min(TILE_ROWS, group - r)
        weights, stride = scores.ctypes.data + r * scores.strides[0], scores.strides[0] // 4
        out = sums.ctypes.data + r * sums.strides[0]
        for d in range(0, in_columns, VECTORS * LANES):
            add_columns(weights, stride, num_rows, cache, values.ctypes.data, d, count, upcoming.ctypes.data,
                        out + 4 * d, head_dim)  # fmt: skip
        for d in range(in_columns, in_vectors, LANES):
            add_vector(weights, stride, num_rows, cache, values.ctypes.data, d, count, upcoming.ctypes.data,
                       out + 4 * d, head_dim)  # fmt: skip
    if in_vectors < head_dim:
        for i in range(count):
            value = rows_at(cache, values[i], 1, head_dim)
            for r in range(group):
                for d in range(in_vectors, head_dim):
                    sums[r, d] += scores[r, i] * widened(value[0, d])


@compiled
def _finish(place: Any, is_whole: Any, state: Any, sums: Any, out: Any, partials: Any) -> None:
    """To `out`, or, of one split of several, to partials [S, P, H, D + 2]: sums, maximum, sum of weights"""
    s, _, index, head, _, _ = place
    group, head_dim = sums.shape
    for r in range(group):
        if is_whole:
            weight = np.float32(1) / state[r, 1] if state[r, 1] != 0 else np.float32(0)
            for d in range(head_dim):
                out[s, (head * group + r) * head_dim + d] = sums[r, d] * weight
        else:
            for d in range(head_dim):
                partials[s, index, head * group + r, d] = sums[r, d]
            partials[s, index, head * group + r, head_dim] = state[r, 0]
            partials[s, index, head * group + r, head_dim + 1] = state[r, 1]


@compiled
def _work(counter: Any, query: Any, num_heads: Any, cache: Any, shape: Any, layer: Any, block_tables: Any,
          seq_lens: Any, scale: Any, cap: Any, window: Any, out: Any, partials: Any) -> None:  # fmt: skip
    _, num_kv_heads, block_size, head_dim = shape
    group, split = num_heads // num_kv_heads, compiled_split_tokens(block_size)
    most = padded(split, LANES)
    keys, values, next_keys = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    scaled, sums = np.zeros((group, head_dim), np.float32), np.zeros((group, head_dim), np.float32)
    scores, state = np.zeros((group, most), np.float32), np.zeros((group, 2), np.float32)
    to_values = num_kv_heads * cache.strides[0]
    place = locate(next_piece(counter), 0, 0, seq_lens, window, split, num_kv_heads)
    if place[0] < len(seq_lens):
        _list_keys(cache, shape, layer, block_tables, place, keys)
    while place[0] < len(seq_lens):
        s, base, _, head, start, end = place
        upcoming = locate(next_piece(counter), s, base, seq_lens, window, split, num_kv_heads)
        for i in range(most):
            values[i] = keys[i] + to_values
        _list_keys(cache, shape, layer, block_tables, upcoming, next_keys)
        count = end - start
        width = padded(count, LANES)
        for r in range(group):
            for d in range(head_dim):
                scaled[r, d] = query[s, (head * group + r) * head_dim + d] * scale
        _score(scaled, cache, width, keys, values, scores)
        _scale(cache, shape, layer, block_tables, place, 0, scores)
        if cap > 0:
            soft_cap(scores, group, cap)
        _softmax(count, width, scores, state)
        _scale(cache, shape, layer, block_tables, place, 1, scores)
        _add_values(count, scores, cache, values, next_keys, sums)
        _finish(place, splits_of(seq_lens[s], window, split)[2] == 1, state, sums, out, partials)
        keys, next_keys = next_keys, keys
        place = upcoming


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
        float32_array(a[20], (num_seqs, a[21], num_heads, head_dim + 2)),
    )


@loop
def over_float32(arguments: Any) -> None:
    a = carray(arguments, 22)
    _attend(arguments, a, float32_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_float16(arguments: Any) -> None:
    a = carray(arguments, 22)
    _attend(arguments, a, uint16_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_int8(arguments: Any) -> None:
    a = carray(arguments, 22)
    _attend(arguments, a, int8_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))
