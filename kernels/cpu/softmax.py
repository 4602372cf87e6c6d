"""The order in which attention is added up, by whatever loop: the same to the last bit in any batch, step and chunk.

Keys are taken in tiles of TILE_KEYS, from position 0 on, and each gives a part: scores, each of CHAINS sums over every
CHAINS-th dimension, added up as (0 + 2) + (1 + 3); weights, relative to the tile's maximum; their sum, of each lane by
itself, then folded; weighted values, one token's after the other. Parts are added to those before, one by one.

All is `strict`, but for what is `fused`: a compiler that may choose adds up otherwise in another loop, or at its end.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import intrinsic, strict, types
from kvasir.kernels.cpu.simd import LANES, TILE_ROWS, exp2, largest_of_rows, reduced, tanh, write_exp2
from kvasir.kernels.cpu.tile_code import F32, number

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
def hide(row: Any, low: Any, high: Any, width: Any) -> None:
    """Of row [C] of scores, all before `low` and from `high` on, up to `width`, get no weight."""
    for c in range(low):
        row[c] = -np.inf
    for c in range(high, width):
        row[c] = -np.inf


@intrinsic
def weigh(typing: Any, row: Any, width: Any) -> Any:
    """The scores at address `row` become exp2(score - maximum). -> maximum, sum. width: whole vectors"""
    result = types.UniTuple(types.float32, 2)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, width = arguments
        (maximum,), (total,) = _write_weights(builder, [row], width)
        return context.make_tuple(builder, result, (maximum, total))

    return result(types.int64, types.int64), codegen


@intrinsic
def weigh_rows(typing: Any, rows: Any, stride: Any, width: Any, maxima: Any, totals: Any) -> Any:
    """As `weigh`, of TILE_ROWS rows. All are addresses; stride: bytes"""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, stride, width, *places = arguments
        rows = [tile_code.row(builder, first, stride, number(r)) for r in range(TILE_ROWS)]
        for place, found in zip(places, _write_weights(builder, rows, width), strict=True):
            for r, value in enumerate(found):
                builder.store(value, tile_code.pointer(builder, place, 4 * r, F32), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _write_weights(builder: Any, rows: list[Any], width: Any) -> tuple[list[Any], list[Any]]:
    """Writes the code of `weigh` for several rows -> the maximum, and the sum, of each"""
    # Finite where nothing is seen: -inf less -inf is NaN.
    maxima = largest_of_rows(builder, rows, width, float(np.finfo(np.float32).min))
    everywhere = [tile_code.spread(builder, maximum, LANES) for maximum in maxima]

    def weighed(r: int, place: Any) -> Any:
        weights = write_exp2(builder, builder.fsub(builder.load(place, align=4), everywhere[r]))
        builder.store(weights, place, align=4)
        return weights

    return maxima, reduced(builder, rows, width, 0.0, builder.fadd, weighed)


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
