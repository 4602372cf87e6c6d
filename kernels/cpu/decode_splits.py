"""Decode attention cuts a sequence into splits, which any thread may take, and combines what comes of them.

Where the cuts are depends on nothing but the block size, and so do results: neither batch nor threads change a bit.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, compiled, loop
from kvasir.kernels.cpu.simd import exp2, float32_array, int32_array, next_piece

# Shapes: S sequences  H query heads  D head dim  C tokens of a split, at most  P splits of a sequence, at most
_SPLIT_TOKENS = 128
_SPLITS_A_THREAD = 4  # from here on, there is work enough for all threads


def split_tokens(block_size: int) -> int:
    """C: whole blocks"""
    return max(1, _SPLIT_TOKENS // block_size) * block_size


compiled_split_tokens = compiled(split_tokens)


@compiled
def splits_of(end: Any, window: Any, split: Any) -> Any:
    """The first token that a sequence of `end` tokens sees, its split, and the number of splits from there on, >= 1"""
    first_seen = max(0, end - window) if window > 0 else 0
    return first_seen, first_seen // split, max(1, (end + split - 1) // split - first_seen // split)


@compiled
def heads_a_piece(seq_lens: Any, window: Any, split: Any, num_kv_heads: Any, most: Any, num_threads: Any) -> Any:
    """How many KV heads of a split, up to `most`, are one piece of work: one, where there are few splits to share"""
    num_splits = 0
    for s in range(len(seq_lens)):
        num_splits += splits_of(seq_lens[s], window, split)[2]
    if num_splits < _SPLITS_A_THREAD * num_threads:
        return 1
    heads = max(1, min(most, num_kv_heads))
    while num_kv_heads % heads != 0:
        heads -= 1
    return heads


@compiled
def locate(piece: Any, s: Any, base: Any, seq_lens: Any, window: Any, split: Any, num_kv_heads: Any, heads: Any) -> Any:
    """piece of `heads` KV heads -> its sequence (S: there is no such piece), that one's first piece, split, first KV
    head, first token and end of the split

    s, base: a sequence that is not behind the piece's, and its first piece
    """
    pieces_a_split = num_kv_heads // heads
    while s < len(seq_lens):
        first_seen, first_split, num_splits = splits_of(seq_lens[s], window, split)
        if piece < base + num_splits * pieces_a_split:
            index, head = (piece - base) // pieces_a_split, (piece - base) % pieces_a_split * heads
            start = max(first_seen, (first_split + index) * split)
            return s, base, index, head, start, min(seq_lens[s], (first_split + index + 1) * split)
        base += num_splits * pieces_a_split
        s += 1
    return s, base, 0, 0, 0, 0


@compiled
def _combine(counter: Any, partials: Any, seq_lens: Any, window: Any, split: Any, out: Any) -> None:
    num_seqs, _, num_heads, width = partials.shape
    head_dim = width - 2
    while True:
        piece = next_piece(counter)
        s, head = piece // num_heads, piece % num_heads
        if s >= num_seqs:
            return
        _, _, num_splits = splits_of(seq_lens[s], window, split)
        if num_splits == 1:
            continue
        highest = np.float32(-np.inf)
        for index in range(num_splits):
            highest = max(highest, partials[s, index, head, head_dim])
        total = np.float32(0)
        for d in range(head_dim):
            out[s, head * head_dim + d] = 0
        for index in range(num_splits):
            weight = exp2(partials[s, index, head, head_dim] - highest)
            total += weight * partials[s, index, head, head_dim + 1]
            for d in range(head_dim):
                out[s, head * head_dim + d] += weight * partials[s, index, head, d]
        for d in range(head_dim):
            out[s, head * head_dim + d] /= total


@loop
def combine(arguments: Any) -> None:
    """[_, S, P, H, D, partials, sequence lengths, window, tokens of a split, out]"""
    a = carray(arguments, 10)
    partials = float32_array(a[5], (a[1], a[2], a[3], a[4] + 2))
    out = float32_array(a[9], (a[1], a[3] * a[4]))
    _combine(arguments, partials, int32_array(a[6], (a[1],)), a[7], a[8], out)
