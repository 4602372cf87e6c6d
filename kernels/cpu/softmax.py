"""The order in which attention is added up, by whatever loop: the same to the last bit in any batch, step and chunk.

Keys are taken in tiles of TILE_KEYS, from position 0 on, and each gives a part: scores, each of CHAINS sums over every
CHAINS-th dimension, added up as (0 + 2) + (1 + 3); weights, relative to the tile's maximum; their sum, of each lane by
itself, then folded; weighted values, one token's after the other. Parts are added to those before, one by one.

All is `strict`, but for what is `fused`: a compiler that may choose adds up otherwise in another loop, or at its end.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import strict
from kvasir.kernels.cpu.simd import exp2, largest_of, sum_of, tanh

# Shapes: R queries  C columns, TILE_KEYS or more  D head dim
TILE_KEYS = 128
CHAINS = 4


@strict
def soft_cap(scores: Any, num_rows: Any, width: Any, cap: Any) -> None:
    """scores [R, C]: the first rows and columns become cap * tanh(score)."""
    for r in range(num_rows):
        row = scores[r]
        for c in range(width):
            row[c] = cap * tanh(row[c])


@strict
def weigh(row: Any, low: Any, high: Any, width: Any) -> Any:
    """row [C] of scores: where low <= column < high it becomes exp2(score - maximum), elsewhere 0. -> maximum, sum

    width: whole vectors, of which alone it reads and writes
    """
    row[:low] = -np.inf
    row[high:width] = -np.inf
    highest = largest_of(row.ctypes.data, width)
    for c in range(width):
        row[c] = exp2(row[c] - highest)
    row[:low] = 0  # exp2 gives no less than 2 ** -126, and what must not be seen counts for nothing at all
    row[high:width] = 0
    return highest, sum_of(row.ctypes.data, width)


@strict
def factors(highest: Any, maximum: Any, total: Any) -> Any:
    """highest: of the parts so far; maximum, total: of one more, its maximum and sum of weights

    -> what is highest now; what the parts so far, and this one, are multiplied by before they are added
    """
    if total == 0:  # nothing was seen in it
        return highest, np.float32(1), np.float32(0)
    now = max(highest, maximum)
    return now, exp2(highest - now), exp2(maximum - now)


@strict
def add_part(sums: Any, before: Any, part: Any, factor: Any) -> None:
    """sums [D] = sums * before + part * factor"""
    for d in range(len(sums)):
        sums[d] = sums[d] * before + part[d] * factor


@strict
def finish(total: Any, sums: Any, out: Any) -> None:
    """out [D] = sums / total; 0 if nothing was seen"""
    weight = np.float32(1) / total if total != 0 else np.float32(0)
    for d in range(len(out)):
        out[d] = sums[d] * weight
