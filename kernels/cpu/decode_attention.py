"""Attention of one new token a sequence over the paged cache, read in place.

A piece of work is one KV head, or several that lie side by side, of one split of a sequence (`decode_splits`). Of a
piece all scores are computed first, and then all weighted values. Its rows are listed by their addresses, keys, then
values, then the first of the next piece; and what is some way down the list is fetched while a row is computed with.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu import softmax
from kvasir.kernels.cpu.compiling import carray, lazy_loop, strict
from kvasir.kernels.cpu.decode_rows import list_ahead, list_rows, scale
from kvasir.kernels.cpu.decode_splits import heads_a_piece, locate, splits_of
from kvasir.kernels.cpu.decode_tile import VECTORS, add_columns, add_few, add_vector, score_keys
from kvasir.kernels.cpu.kv_rows import cache_shape, has_scales
from kvasir.kernels.cpu.simd import (
    LANES,
    TILE_ROWS,
    float32_array,
    float32_of,
    int8_array,
    int32_array,
    next_piece,
    padded,
    uint16_array,
)
from kvasir.kernels.cpu.softmax import CHAINS, TILE_KEYS

# Shapes: S sequences  B tokens a block  H query heads  K KV heads  G = H / K  D head dim
#   C tokens of a split, at most     P splits of a sequence, at most     W tokens of a piece, padded to whole vectors
#   J query heads of a piece
_BYTES_SIDE_BY_SIDE = 16 << 10  # of keys of a block that one piece has at most
_BYTES_AHEAD = 8 << 10  # how far ahead of the arithmetic memory is read: while it is slow, so much is under way


@strict
def _score(query: Any, cache: Any, heads: Any, width: Any, rows: Any, num_ahead: Any, scores: Any) -> None:
    """scores [J, C] = query [J, D] @ the first `width` keys.T, by their addresses"""
    group, head_dim = scores.shape[0] // heads, query.shape[1]
    ahead = rows.ctypes.data + 8 * num_ahead
    for first in range(0, width, LANES):
        for head in range(heads):
            for r in range(head * group, (head + 1) * group, TILE_ROWS):
                score_keys(
                    query.ctypes.data + r * query.strides[0], head_dim, min(TILE_ROWS, (head + 1) * group - r), cache,
                    rows.ctypes.data + 8 * first, head * cache.strides[0], head_dim, ahead + 8 * first,
                    scores.ctypes.data + r * scores.strides[0] + 4 * first, scores.strides[0] // 4,
                )  # fmt: skip


@strict
def _add_values(
    scores: Any, cache: Any, heads: Any, count: Any, width: Any, rows: Any, num_ahead: Any, sums: Any
) -> None:
    """sums [J, D] = scores @ the first `count` values, by their addresses, from rows[width] on

    What lies behind them is an earlier owner's, perhaps NaN, and must not even be multiplied by 0.
    """
    group, head_dim = sums.shape[0] // heads, sums.shape[1]
    in_columns = head_dim // (VECTORS * LANES) * VECTORS * LANES
    in_vectors = head_dim // LANES * LANES
    stride = scores.strides[0] // 4
    sums[:] = 0
    for first in range(0, count, LANES):
        values = rows.ctypes.data + 8 * (width + first)
        ahead, num_tokens = values + 8 * num_ahead, min(LANES, count - first)
        for head in range(heads):
            offset = head * cache.strides[0]
            for r in range(head * group, (head + 1) * group, TILE_ROWS):
                num_rows = min(TILE_ROWS, (head + 1) * group - r)
                weights = scores.ctypes.data + r * scores.strides[0] + 4 * first
                out = sums.ctypes.data + r * sums.strides[0]
                for d in range(0, in_columns, VECTORS * LANES):
                    add_columns(weights, stride, num_rows, cache, values, offset, d, num_tokens, ahead, out + 4 * d,
                                head_dim)  # fmt: skip
                for d in range(in_columns, in_vectors, LANES):
                    add_vector(weights, stride, num_rows, cache, values, offset, d, num_tokens, ahead, out + 4 * d,
                               head_dim)  # fmt: skip
                for d in range(in_vectors, head_dim, CHAINS):
                    add_few(weights, stride, num_rows, cache, values, offset, d, num_tokens, ahead, out + 4 * d,
                            head_dim)  # fmt: skip


@strict
def _take_query(query: Any, s: Any, first_head: Any, factor: Any, scaled: Any) -> None:
    """scaled [J, D] = factor * the query heads from `first_head` on"""
    source = float32_array(query.ctypes.data + s * query.strides[0] + first_head * scaled.strides[0], (scaled.size,))
    flat = scaled.ravel()
    for i in range(scaled.size):
        flat[i] = source[i] * factor


@strict
def _finish(place: Any, first_head: Any, is_whole: Any, state: Any, sums: Any, out: Any, partials: Any) -> None:
    """To `out`, or, of one split of several, to partials [S, P, H, D + 2]: sums, maximum, sum of weights"""
    s, index, head_dim = place[0], place[2], sums.shape[1]
    for r in range(sums.shape[0]):
        own, head = sums[r], first_head + r
        if is_whole:
            softmax.finish(state[r, 1], own, out[s, head * head_dim : (head + 1) * head_dim])
        else:
            partial = partials[s, index, head]
            for d in range(head_dim):
                partial[d] = own[d]
            partial[head_dim], partial[head_dim + 1] = state[r, 0], state[r, 1]


@strict
def _work(counter: Any, query: Any, num_heads: Any, cache: Any, shape: Any, layer: Any, block_tables: Any,
          seq_lens: Any, factor: Any, cap: Any, window: Any, num_threads: Any, out: Any,
          partials: Any) -> None:  # fmt: skip
    _, num_kv_heads, block_size, head_dim = shape
    group, row_bytes = num_heads // num_kv_heads, head_dim * cache.itemsize
    side_by_side = _BYTES_SIDE_BY_SIDE // (block_size * row_bytes)
    heads = heads_a_piece(seq_lens, window, num_kv_heads, side_by_side, num_threads)
    num_ahead = min(TILE_KEYS, padded(_BYTES_AHEAD // (heads * row_bytes) + 1, LANES))
    rows, next_rows = np.zeros(2 * TILE_KEYS + num_ahead, np.int64), np.zeros(2 * TILE_KEYS + num_ahead, np.int64)
    scaled, sums = np.empty((heads * group, head_dim), np.float32), np.empty((heads * group, head_dim), np.float32)
    scores, state = np.empty((heads * group, TILE_KEYS), np.float32), np.empty((heads * group, 2), np.float32)
    scales = np.empty(TILE_KEYS, np.float32)
    place = locate(next_piece(counter), 0, 0, seq_lens, window, num_kv_heads, heads)
    width = list_rows(cache, shape, layer, block_tables, place, heads, rows)
    while place[0] < len(seq_lens):
        s, base, _, head, start, end, low = place
        upcoming = locate(next_piece(counter), s, base, seq_lens, window, num_kv_heads, heads)
        next_width = list_rows(cache, shape, layer, block_tables, upcoming, heads, next_rows)
        list_ahead(width, num_ahead, next_rows, next_width, rows)
        _take_query(query, s, head * group, factor, scaled)
        _score(scaled, cache, heads, width, rows, num_ahead, scores)
        if has_scales(cache):
            scale(cache, shape, layer, block_tables, place, heads, 0, scales, scores)
        if cap > 0:
            softmax.soft_cap(scores, heads * group, width, cap)
        for r in range(heads * group):
            softmax.hide(scores[r], low, end - start, width)
            state[r, 0], state[r, 1] = softmax.weigh(scores[r].ctypes.data, width)
        if has_scales(cache):
            scale(cache, shape, layer, block_tables, place, heads, 1, scales, scores)
        _add_values(scores, cache, heads, end - start, width, rows, num_ahead, sums)
        is_whole = splits_of(seq_lens[s], window)[2] == 1
        _finish(place, head * group, is_whole, state, sums, out, partials)
        rows, next_rows = next_rows, rows
        place, width = upcoming, next_width


@strict
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
        a[22],
        float32_array(a[19], (num_seqs, num_heads * head_dim)),
        float32_array(a[20], (num_seqs, a[21], num_heads, head_dim + 2)),
    )


@lazy_loop
def over_float32(arguments: Any) -> None:
    a = carray(arguments, 23)
    _attend(arguments, a, float32_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_float16(arguments: Any) -> None:
    a = carray(arguments, 23)
    _attend(arguments, a, uint16_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_int8(arguments: Any) -> None:
    a = carray(arguments, 23)
    _attend(arguments, a, int8_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))
