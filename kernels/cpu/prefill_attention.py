"""Attention of prompt chunks over the paged cache: tiles of queries against tiles of keys, with a running softmax."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, compiled, lazy_loop, loop
from kvasir.kernels.cpu.kv_rows import address_of, cache_shape, rows_at, scale_of
from kvasir.kernels.cpu.simd import (
    TILE_COLUMNS,
    TILE_ROWS,
    exp2,
    float32_array,
    float32_of,
    int8_array,
    int32_array,
    largest_of,
    multiply_add,
    next_piece,
    padded,
    soft_cap,
    uint16_array,
    widened,
)

# Shapes: T tokens  S sequences  M blocks of the longest  B tokens a block
#   H query heads  K KV heads  G = H / K  D head dim
#   R rows of a query tile = its tokens x G     C = TILE_KEYS keys of a key tile     W = D, padded to whole tiles
TILE_TOKENS = TILE_KEYS = 64
_NOTHING = np.float32(-np.inf)


@compiled
def _locate(piece: Any, query_starts: Any, num_kv_heads: Any) -> Any:
    """piece -> sequence (-1: there is no such piece), first token of the query tile in its chunk, KV head.

    The last tiles of a chunk see the most keys, so they come first.
    """
    tile, head = piece // num_kv_heads, piece % num_kv_heads
    for s in range(len(query_starts) - 1):
        num_tiles = (query_starts[s + 1] - query_starts[s] + TILE_TOKENS - 1) // TILE_TOKENS
        if tile < num_tiles:
            return s, (num_tiles - 1 - tile) * TILE_TOKENS, head
        tile -= num_tiles
    return -1, 0, 0


@compiled
def _stage(cache: Any, shape: Any, layer: Any, block_table: Any, head: Any, first: Any, count: Any, keys: Any,
           values: Any) -> None:  # fmt: skip
    """Tokens [first, first + count) of one head -> keys [D, C] (transposed), values [C, W]; zeros behind."""
    num_layers, num_kv_heads, block_size, head_dim = shape
    layout = (num_layers, num_kv_heads)
    if count < TILE_KEYS:
        keys[:] = 0
        values[count:] = 0
    for i in range(count):
        block, offset = block_table[(first + i) // block_size], (first + i) % block_size
        cached = rows_at(cache, address_of(cache, layout, block, layer, 0, head), block_size, head_dim)
        scale = scale_of(cached, offset)
        for d in range(head_dim):
            keys[d, i] = widened(cached[offset, d]) * scale
        cached = rows_at(cache, address_of(cache, layout, block, layer, 1, head), block_size, head_dim)
        scale = scale_of(cached, offset)
        for d in range(head_dim):
            values[i, d] = widened(cached[offset, d]) * scale


@compiled
def _softmax_row(r: Any, scores: Any, low: Any, high: Any, state: Any, sums: Any) -> None:
    """scores[r] -> exp2(score - the row's maximum so far) where low <= column < high, else 0.

    state[r] = [maximum so far, sum so far]; the row's `sums` are brought to the new maximum.
    """
    is_cut = low > 0 or high < TILE_KEYS
    if is_cut:
        for c in range(TILE_KEYS):
            scores[r, c] = scores[r, c] if low <= c < high else _NOTHING
    highest = max(state[r, 0], largest_of(scores.ctypes.data + r * scores.strides[0], TILE_KEYS))
    if highest == _NOTHING:
        for c in range(TILE_KEYS):
            scores[r, c] = 0
        return
    if highest != state[r, 0]:
        rescale = exp2(state[r, 0] - highest)
        state[r, 0] = highest
        state[r, 1] *= rescale
        for d in range(sums.shape[1]):
            sums[r, d] *= rescale
    total = np.float32(0)
    for c in range(TILE_KEYS):
        weight = exp2(scores[r, c] - highest)
        scores[r, c] = weight
        total += weight
    if is_cut:  # exp2 gives no less than 2 ** -126, and what must not be seen counts for nothing at all
        total = np.float32(0)
        for c in range(TILE_KEYS):
            weight = scores[r, c] if low <= c < high else np.float32(0)
            scores[r, c] = weight
            total += weight
    state[r, 1] += total


@compiled
def _attend(query: Any, num_rows: Any, group: Any, start: Any, cap: Any, window: Any, cache: Any, shape: Any,
            layer: Any, block_table: Any, head: Any, scores: Any, sums: Any, state: Any, keys: Any,
            values: Any) -> None:  # fmt: skip
    """query [R, D], row r at position start + r // G -> sums [R, W] (weighted values), state [R, 2]."""
    sums[:] = 0
    state[:, 0] = _NOTHING
    state[:, 1] = 0
    end = start + (num_rows - 1) // group + 1
    first_seen = max(0, start + 1 - window) if window > 0 else 0
    for first in range(first_seen // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        _stage(cache, shape, layer, block_table, head, first, min(TILE_KEYS, end - first), keys, values)
        scores[:] = 0
        multiply_add(query, keys, scores)
        if cap > 0:
            soft_cap(scores, num_rows, cap)
        for r in range(num_rows):
            position = start + r // group
            low = position + 1 - window - first if window > 0 else 0
            _softmax_row(r, scores, low, position + 1 - first, state, sums)
        multiply_add(scores, values, sums)


@compiled
def _work(counter: Any, query: Any, num_heads: Any, cache: Any, shape: Any, layer: Any, block_tables: Any,
          query_starts: Any, seq_lens: Any, scale: Any, cap: Any, window: Any, out: Any) -> None:  # fmt: skip
    _, num_kv_heads, _, head_dim = shape
    group = num_heads // num_kv_heads
    tile = np.zeros((TILE_TOKENS * group, head_dim), np.float32)
    scores = np.zeros((TILE_TOKENS * group, TILE_KEYS), np.float32)
    sums = np.zeros((TILE_TOKENS * group, padded(head_dim, TILE_COLUMNS)), np.float32)
    state = np.zeros((TILE_TOKENS * group, 2), np.float32)
    keys = np.zeros((head_dim, TILE_KEYS), np.float32)
    values = np.zeros((TILE_KEYS, padded(head_dim, TILE_COLUMNS)), np.float32)
    while True:
        s, first, head = _locate(next_piece(counter), query_starts, num_kv_heads)
        if s < 0:
            return
        begin = query_starts[s] + first
        num_rows = min(TILE_TOKENS, query_starts[s + 1] - begin) * group
        used = padded(num_rows, TILE_ROWS)
        for r in range(num_rows):
            column = (head * group + r % group) * head_dim
            for d in range(head_dim):
                tile[r, d] = query[begin + r // group, column + d] * scale
        start = seq_lens[s] - query_starts[s + 1] + begin
        _attend(tile[:used], num_rows, group, start, cap, window, cache, shape, layer, block_tables[s], head,
                scores[:used], sums[:used], state[:used], keys, values)  # fmt: skip
        for r in range(num_rows):
            weight = np.float32(1) / state[r, 1] if state[r, 1] != 0 else np.float32(0)
            column = (head * group + r % group) * head_dim
            for d in range(head_dim):
                out[begin + r // group, column + d] = sums[r, d] * weight


@compiled
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


@loop
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
