"""Decode attention cuts a sequence into splits, the tiles of `softmax`, which any thread may take, and merges them."""

from typing import Any

import numpy as np

from kvasir.kernels.cpu import softmax
from kvasir.kernels.cpu.compiling import carray, loop, strict
from kvasir.kernels.cpu.simd import LANES, float32_array, int32_array, next_piece
from kvasir.kernels.cpu.softmax import TILE_KEYS

# Shapes: S sequences  H query heads  D head dim  P splits of a sequence, at most
_SPLITS_A_THREAD = 4  # from here on, there is work enough for all threads


@strict
def splits_of(end: Any, window: Any) -> Any:
    """The first token that a sequence of `end` tokens sees, its split, and the number of splits from there on, >= 1"""
    first_seen = max(0, end - window) if window > 0 else 0
    return first_seen, first_seen // TILE_KEYS, max(1, (end + TILE_KEYS - 1) // TILE_KEYS - first_seen // TILE_KEYS)


@strict
def heads_a_piece(seq_lens: Any, window: Any, num_kv_heads: Any, most: Any, num_threads: Any) -> Any:
    """How many KV heads of a split, up to `most`, are one piece of work: one, where there are few splits to share"""
    num_splits = 0
    for s in range(len(seq_lens)):
        num_splits += splits_of(seq_lens[s], window)[2]
    if num_splits < _SPLITS_A_THREAD * num_threads:
        return 1
    heads = max(1, min(most, num_kv_heads))
    while num_kv_heads % heads != 0:
        heads -= 1
    return heads


@strict
def locate(piece: Any, s: Any, base: Any, seq_lens: Any, window: Any, num_kv_heads: Any, heads: Any) -> Any:
    """piece of `heads` KV heads -> its sequence (S: there is no such piece), that one's first piece, split, first KV
    head, first token and end of the split, and how many of its first tokens, less than LANES, are not seen

    s, base: a sequence that is not behind the piece's, and its first piece
    """
    pieces_a_split = num_kv_heads // heads
    while s < len(seq_lens):
        first_seen, first_split, num_splits = splits_of(seq_lens[s], window)
        if piece < base + num_splits * pieces_a_split:
            index, head = (piece - base) // pieces_a_split, (piece - base) % pieces_a_split * heads
            seen = max(first_seen, (first_split + index) * TILE_KEYS)
            end = min(seq_lens[s], (first_split + index + 1) * TILE_KEYS)
            return s, base, index, head, seen // LANES * LANES, end, seen % LANES
        base += num_splits * pieces_a_split
        s += 1
    return s, base, 0, 0, 0, 0, 0


@strict
def _merge(counter: Any, partials: Any, seq_lens: Any, window: Any, out: Any) -> None:
    num_seqs, _, num_heads, width = partials.shape
    head_dim = width - 2
    while True:
        piece = next_piece(counter)
        s, head = piece // num_heads, piece % num_heads
        if s >= num_seqs:
            return
        _, _, num_splits = splits_of(seq_lens[s], window)
        if num_splits == 1:
            continue
        sums = out[s, head * head_dim : (head + 1) * head_dim]
        sums[:] = 0
        highest, total = np.float32(-np.inf), np.float32(0)
        for index in range(num_splits):
            part = partials[s, index, head]
            highest, before, factor = softmax.factors(highest, part[head_dim], part[head_dim + 1])
            total = total * before + part[head_dim + 1] * factor
            softmax.add_part(sums, before, part, factor)
        softmax.finish(total, sums, sums)


@loop
def merge(arguments: Any) -> None:
    """[_, S, P, H, D, partials, sequence lengths, window, out]"""
    a = carray(arguments, 9)
    partials = float32_array(a[5], (a[1], a[2], a[3], a[4] + 2))
    out = float32_array(a[8], (a[1], a[3] * a[4]))
    _merge(arguments, partials, int32_array(a[6], (a[1],)), a[7], out)
