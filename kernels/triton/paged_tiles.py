# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Queries against tiles of keys and values that lie in blocks, with a running softmax: the inside of both attentions.

Rows of queries are [ROWS, D]: row r belongs to token r // G and, within the group of G query heads that share a KV
head, to head r % G, so that a tile of keys is loaded once for the whole group. After each tile of keys

    top    [ROWS]     the highest score of a row so far
    total  [ROWS]     the sum of exp(score - top)
    acc    [ROWS, D]  the sum of exp(score - top) value

and a tile with a higher score rescales what was summed before. Scores are kept in base 2: exp2 is what the hardware
has, and log2(e) goes into the scale.
"""

import triton
import triton.language as tl

# Shapes: B tokens a block  D head dim  D_PAD the power of two that holds it  G query heads of a KV head
#   ROWS rows of queries  TILE keys in a tile
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,  # [ROWS, D_PAD]
    positions,  # [ROWS] of each row's token in its sequence
    first_position,  # of the first row that counts, and of the last
    last_position,
    first_key,  # the first that some row sees
    keys_ptr,  # this layer's and head's keys in block 0
    block_table_ptr,  # of this sequence
    block_stride,
    value_offset,  # from a key to its value
    first_tile,  # tiles [first, last) of the keys that some row sees
    last_tile,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """-> acc, top, total of the tiles [first_tile, last_tile)"""
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    # tiles | cut by the window | seen by every row: no mask | cut by causality |
    #       first          whole_first                    whole_last          last
    whole_first = first_tile
    if WINDOW > 0:
        whole_first = (tl.maximum(last_position - WINDOW + 1, 0) + TILE - 1) // TILE
        whole_first = tl.minimum(tl.maximum(whole_first, first_tile), last_tile)
    whole_last = tl.maximum(tl.minimum((first_position + 1) // TILE, last_tile), whole_first)
    if WINDOW > 0:
        acc, top, total = _attend_tiles(
            q, positions, first_key, last_position, keys_ptr, block_table_ptr, block_stride, value_offset,
            first_tile, whole_first, acc, top, total, scale, SOFTCAP, WINDOW, B, D, TILE, DOT, True,
        )  # fmt: skip
    acc, top, total = _attend_tiles(
        q, positions, first_key, last_position, keys_ptr, block_table_ptr, block_stride, value_offset,
        whole_first, whole_last, acc, top, total, scale, SOFTCAP, WINDOW, B, D, TILE, DOT, False,
    )  # fmt: skip
    return _attend_tiles(
        q, positions, first_key, last_position, keys_ptr, block_table_ptr, block_stride, value_offset,
        whole_last, last_tile, acc, top, total, scale, SOFTCAP, WINDOW, B, D, TILE, DOT, True,
    )  # fmt: skip


@triton.jit
def _attend_tiles(
    q, positions, first_key, last_position, keys_ptr, block_table_ptr, block_stride, value_offset,
    first_tile, last_tile, acc, top, total, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, B: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    DOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, q.shape[1])[None, :]
    for tile in range(first_tile, last_tile):
        at = tile * TILE + tl.arange(0, TILE)  # [TILE], places in the sequence
        # What no row sees is not read: its block may be another's by now, and a place may hold anything, NaN too.
        exists = (at >= first_key) & (at <= last_position)
        block = tl.load(block_table_ptr + at // B, mask=exists, other=0)
        # A cache has more than 2^31 elements: 64 bits before the product.
        place = keys_ptr + (block.to(tl.int64) * block_stride)[:, None] + (at % B)[:, None] * D + d  # [TILE, D_PAD]
        if MASKED:
            readable = exists[:, None] & (d < D)
            k = tl.load(place, mask=readable, other=0.0).to(DOT)
            v = tl.load(place + value_offset, mask=readable, other=0.0).to(DOT)
        elif q.shape[1] > D:
            k = tl.load(place, mask=d < D, other=0.0).to(DOT)
            v = tl.load(place + value_offset, mask=d < D, other=0.0).to(DOT)
        else:
            k = tl.load(place).to(DOT)
            v = tl.load(place + value_offset).to(DOT)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, TILE]
        if SOFTCAP > 0:
            scores = _tanh(scores * (scale / SOFTCAP)) * (SOFTCAP * _LOG2_E)
        else:
            scores *= scale * _LOG2_E
        if MASKED:
            seen = at[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen &= at[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: no inf - inf
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _tanh(x):
    """Without a library call, which the interpreter has not, and without overflow."""
    decay = tl.exp2(tl.abs(x) * (-2 * _LOG2_E))
    magnitude = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def locate(counts, index):
    """counts [S] of things per sequence, index of a thing of all -> its sequence (S: there is none), its place there

    counts [2, 0, 3], index 3  ->  2, 1
    """
    ends = tl.cumsum(counts, axis=0)
    sequence = tl.sum((ends <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(ends <= index, counts, 0), axis=0)
    return sequence, index - before
