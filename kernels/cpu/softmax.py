"""The order in which attention is added up, by whatever loop: the same to the last bit in any batch, step and chunk.

Keys are taken in tiles of TILE_KEYS, from position 0 on, and each gives a part: scores, each of CHAINS sums over every
CHAINS-th dimension, added up as (0 + 2) + (1 + 3); weights, relative to the tile's maximum; their sum, of each lane by
itself, then folded; weighted values, one token's after the other. Parts are added to those before, one by one.

All is `strict`, but for what is `fused`: a compiler that may choose adds up otherwise in another loop, or at its end.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import intrinsic, ir, strict, types
from kvasir.kernels.cpu.simd import LANES, exp2, larger, reduced, tanh, write_exp2
from kvasir.kernels.cpu.tile_code import F32, I32

# Shapes: R queries  C columns, TILE_KEYS or more  D head dim
TILE_KEYS = 128
CHAINS = 4

_FLOATS, _INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


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
    highest = _largest(row.ctypes.data, low, high, width)
    return highest, _weigh(row.ctypes.data, low, high, width, highest)


@intrinsic
def _largest(typing: Any, address: Any, low: Any, high: Any, width: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, low, high, width = arguments

        def seen(column: Any, place: Any) -> Any:
            lowest = ir.Constant(_FLOATS, [float("-inf")] * LANES)
            return builder.select(_is_between(builder, column, low, high), builder.load(place, align=4), lowest)

        return reduced(builder, address, width, float("-inf"), larger(builder), seen)

    return types.float32(*[types.int64] * 4), codegen


@intrinsic
def _weigh(typing: Any, address: Any, low: Any, high: Any, width: Any, highest: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, low, high, width, highest = arguments
        highest = tile_code.spread(builder, highest, LANES)

        def weighed(column: Any, place: Any) -> Any:
            weights = write_exp2(builder, builder.fsub(builder.load(place, align=4), highest))
            # exp2 gives no less than 2 ** -126, and what must not be seen counts for nothing at all
            weights = builder.select(_is_between(builder, column, low, high), weights, tile_code.zeros(_FLOATS))
            builder.store(weights, place, align=4)
            return weights

        return reduced(builder, address, width, 0.0, builder.fadd, weighed)

    return types.float32(*[types.int64] * 4, types.float32), codegen


def _is_between(builder: Any, column: Any, low: Any, high: Any) -> Any:
    """Of LANES columns from `column` on, which ones are: low <= column < high"""
    first, end = (builder.trunc(builder.sub(value, low), I32) for value in (column, high))
    columns = builder.add(tile_code.spread(builder, first, LANES), ir.Constant(_INTS, list(range(LANES))))
    return builder.icmp_unsigned("<", columns, tile_code.spread(builder, end, LANES))


@strict
def factors(highest: Any, maximum: Any, total: Any) -> Any:
    """highest: of the parts so far; maximum, total: of one more, its maximum and sum of weights

    -> what is highest now; what the parts so far, and this one, are multiplied by before they are added
    """
    if total == 0:  # nothing was seen in it
        return highest, np.float32(1), np.float32(0)
    less = exp2(-abs(highest - maximum))
    if maximum > highest:
        return maximum, less, np.float32(1)
    return highest, np.float32(1), less


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
