"""The register tile of a product of many rows: SPAN_ROWS rows of x against SPAN panels of columns, all float32.

Its sums stay in registers for all of its inputs.
"""

from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import IS_WIDE, cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.panel_tile import PANEL, ROWS
from kvasir.kernels.cpu.tile_code import F32, I64, number

SPAN = 2 if IS_WIDE else 1  # panels: with two, fewer loads for as many sums
SPAN_ROWS = ROWS[-1] // SPAN

_VECTOR = ir.VectorType(F32, PANEL)


@intrinsic
def multiply_span(
    typing: Any, x: Any, x_stride: Any, num_rows: Any, weights: Any, weights_stride: Any, count: Any, ahead: Any,
    ahead_step: Any, begin: Any, begin_stride: Any, end: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[SPAN_ROWS, SPAN PANEL] = begin + x[R, count] @ (weights[0][count, PANEL], weights[1]) + end, by address

    Strides are bytes a row; of weights, a panel. R <= SPAN_ROWS: the rows behind R repeat the last. `begin` may be out;
    `end` is one row. `ahead` is fetched into the second cache, `ahead_step` bytes further with each input.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, num_rows, weights, weights_stride, count = arguments[:6]
        ahead, ahead_step, begin, begin_stride, end, out, out_stride = arguments[6:]
        rows = range(SPAN_ROWS)
        x_rows = [tile_code.row_or_last(builder, x, x_stride, r, num_rows) for r in rows]
        panels = [tile_code.row(builder, weights, weights_stride, number(i)) for i in range(SPAN)]
        begins, places = (
            [tile_code.row(builder, base, stride, number(r)) for r in rows]
            for base, stride in ((begin, begin_stride), (out, out_stride))
        )
        _multiply(builder, x_rows, panels, count, ahead, ahead_step, begins, end, places)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), codegen


def _multiply(
    builder: Any, x_rows: list[Any], panels: list[Any], count: Any, ahead: Any, ahead_step: Any, begins: list[Any],
    end: Any, places: list[Any],
) -> None:  # fmt: skip
    """Each of the places: the one of `begins` + the row of x @ all panels + end. All are addresses."""
    columns = [4 * PANEL * i for i in range(SPAN)]
    cells = [[cgutils.alloca_once(builder, _VECTOR) for _ in columns] for _ in x_rows]
    for row, begin in zip(cells, begins, strict=True):
        for cell, column in zip(row, columns, strict=True):
            builder.store(tile_code.load(builder, begin, column, _VECTOR), cell)
    with cgutils.for_range_slice(builder, number(0), count, number(1), intp=I64) as (k, _):
        # What is in the second cache comes in time without being asked for.
        tile_code.fetch(builder, tile_code.row(builder, ahead, ahead_step, k), cache=2)
        inputs = [tile_code.row(builder, panel, number(4 * PANEL), k) for panel in panels]
        weights = [tile_code.load(builder, each, 0, _VECTOR) for each in inputs]
        for x_row, row in zip(x_rows, cells, strict=True):
            value = tile_code.load(builder, tile_code.row(builder, x_row, number(4), k), 0, F32)
            everywhere = tile_code.spread(builder, value, PANEL)
            for cell, each in zip(row, weights, strict=True):
                tile_code.fuse(builder, cell, everywhere, each)
    ends = [tile_code.load(builder, end, column, _VECTOR) for column in columns]
    for row, place in zip(cells, places, strict=True):
        for cell, column, each in zip(row, columns, ends, strict=True):
            total = builder.fadd(builder.load(cell), each)
            builder.store(total, tile_code.pointer(builder, place, column, _VECTOR), align=4)
