"""Attention of prompt chunks over the paged cache: tiles of queries against tiles of keys.

All is added up in the order of `softmax`.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu import softmax
from kvasir.kernels.cpu.compiling import carray, lazy_loop, strict
from kvasir.kernels.cpu.kv_rows import cache_shape, has_scales
from kvasir.kernels.cpu.prefill_stage import stage
from kvasir.kernels.cpu.prefill_tile import SCORE_COLUMNS, SCORE_ROWS, TILE_COLUMNS, add_weighted, score, seen
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
    zeros_in_lines,
)
from kvasir.kernels.cpu.softmax import CHAINS, TILE_KEYS

# Shapes: T tokens  S sequences  M blocks of the longest  B tokens a block
#   H query heads  K KV heads  G = H / K  D head dim
#   R rows of a query tile = its tokens x G     C = TILE_KEYS     W = D, padded to whole columns of a tile
_TILE_TOKENS = 64


@strict
def _locate(piece: Any, query_starts: Any, num_kv_heads: Any) -> Any:
    """piece -> sequence (-1: there is no such piece), first token of the query tile in its chunk, KV head.

    The last tiles of a chunk see the most keys, so they come first.
    """
    tile, head = piece // num_kv_heads, piece % num_kv_heads
    for s in range(len(query_starts) - 1):
        num_tiles = (query_starts[s + 1] - query_starts[s] + _TILE_TOKENS - 1) // _TILE_TOKENS
        if tile < num_tiles:
            return s, (num_tiles - 1 - tile) * _TILE_TOKENS, head
        tile -= num_tiles
    return -1, 0, 0


@strict
def _scale(scores: Any, num_rows: Any, width: Any, scales: Any) -> None:
    for r in range(num_rows):
        row = scores[r]
        for c in range(width):
            row[c] *= scales[c]


@strict
def _attend(query: Any, num_rows: Any, group: Any, start: Any, cap: Any, window: Any, cache: Any, shape: Any,
            layer: Any, block_table: Any, head: Any, scores: Any, sums: Any, state: Any, nothing: Any,
            places: Any, keys: Any, values: Any, scales: Any) -> None:  # fmt: skip
    """query [R, D], row r at position start + r // G -> weighted values in sums [R, W], sums of weights in state[1]"""
    end = start + (num_rows - 1) // group + 1
    first_seen = max(0, start + 1 - window) if window > 0 else 0
    highest, totals, maxima, part_totals, befores, factors = state
    sums[:] = 0
    highest[:] = -np.inf
    totals[:] = 0
    for first in range(first_seen // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        count = min(TILE_KEYS, end - first)
        width = padded(count, SCORE_COLUMNS)
        begin = start - first  # the column of row 0's own token
        stage(cache, shape, layer, block_table, head, first, count, width, nothing, places, keys, values, scales)
        score(query, keys, begin, group, width, scores)
        if has_scales(cache):
            _scale(scores, num_rows, width, scales[0])
        if cap > 0:
            softmax.soft_cap(scores, num_rows, width, cap)
        for row in range(0, num_rows, TILE_ROWS):
            columns = padded(seen(row + TILE_ROWS - 1, begin, group, width), LANES)
            for r in range(row, row + TILE_ROWS):
                own = begin + r // group
                low = max(0, own + 1 - window) if window > 0 else 0
                softmax.hide(scores[r], min(low, columns), max(0, own + 1), columns)
            softmax.weigh_rows(scores.ctypes.data + row * scores.strides[0], scores.strides[0], columns,
                               maxima.ctypes.data + 4 * row, part_totals.ctypes.data + 4 * row)  # fmt: skip
        for r in range(num_rows):
            highest[r], befores[r], factors[r] = softmax.factors(highest[r], maxima[r], part_totals[r])
            totals[r] = totals[r] * befores[r] + part_totals[r] * factors[r]
        if has_scales(cache):
            _scale(scores, num_rows, width, scales[1])
        add_weighted(scores, values, begin, group, width, befores, factors, sums)


@strict
def _work(counter: Any, query: Any, num_heads: Any, cache: Any, shape: Any, layer: Any, block_tables: Any,
          query_starts: Any, seq_lens: Any, scale: Any, cap: Any, window: Any, out: Any) -> None:  # fmt: skip
    _, num_kv_heads, _, head_dim = shape
    group = num_heads // num_kv_heads
    most_rows, most_columns = padded(_TILE_TOKENS * group, TILE_ROWS * SCORE_ROWS), padded(head_dim, TILE_COLUMNS)
    tile, scores = zeros_in_lines((most_rows, padded(head_dim, CHAINS))), zeros_in_lines((most_rows, TILE_KEYS))
    sums = zeros_in_lines((most_rows, most_columns))
    state = np.zeros((6, most_rows), np.float32)
    keys = zeros_in_lines((TILE_KEYS // SCORE_COLUMNS, tile.shape[1], SCORE_COLUMNS))
    values = zeros_in_lines((TILE_KEYS, most_columns))
    scales, places = np.zeros((2, TILE_KEYS), np.float32), np.zeros((2, TILE_KEYS), np.int64)
    nothing = np.zeros(head_dim, np.float32)
    while True:
        s, first, head = _locate(next_piece(counter), query_starts, num_kv_heads)
        if s < 0:
            return
        begin = query_starts[s] + first
        num_rows = min(_TILE_TOKENS, query_starts[s + 1] - begin) * group
        scored, used = padded(num_rows, SCORE_ROWS), padded(num_rows, TILE_ROWS)
        for r in range(num_rows):
            source = query.ctypes.data + (begin + r // group) * query.strides[0]
            row = float32_array(source + 4 * (head * group + r % group) * head_dim, (head_dim,))
            for d in range(head_dim):
                tile[r, d] = row[d] * scale
        start = seq_lens[s] - query_starts[s + 1] + begin
        _attend(tile[:scored], num_rows, group, start, cap, window, cache, shape, layer, block_tables[s], head,
                scores, sums[:used], state, nothing, places, keys, values, scales)  # fmt: skip
        for r in range(num_rows):
            column = (head * group + r % group) * head_dim
            softmax.finish(state[1, r], sums[r], out[begin + r // group, column : column + head_dim])


@strict
def _start(arguments: Any, a: Any, cache: Any) -> None:
    num_tokens, num_heads, head_dim, num_seqs = a[2], a[4], a[11], a[14]
    _work(
        arguments,
        float32_array(a[1], (num_tokens, a[3])),
        num_heads,
        cache,
        (a[7], a[8], a[9], head_dim),
        a[12],
        int32_array(a[13], (num_seqs, a[15])),
        int32_array(a[16], (num_seqs + 1,)),
        int32_array(a[17], (num_seqs,)),
        float32_of(a[18]),
        float32_of(a[19]),
        a[20],
        float32_array(a[21], (num_tokens, num_heads * head_dim)),
    )


@lazy_loop
def over_float32(arguments: Any) -> None:
    a = carray(arguments, 22)
    _start(arguments, a, float32_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_float16(arguments: Any) -> None:
    a = carray(arguments, 22)
    _start(arguments, a, uint16_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))


@lazy_loop
def over_int8(arguments: Any) -> None:
    a = carray(arguments, 22)
    _start(arguments, a, int8_array(a[5], cache_shape(a[6], a[7], a[8], a[9], a[10])))
