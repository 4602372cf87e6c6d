"""The register tile of a product of many rows: SPAN_ROWS rows of x against SPAN panels of columns, all float32.

Its sums stay in registers for all of its inputs.
"""

from typing import Any

from kvasir.kernels.cpu.compiling import IS_WIDE, cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.panel_tile import PANEL, ROWS

SPAN = 2 if IS_WIDE else 1  # panels: with two, fewer loads for as many sums
SPAN_ROWS = ROWS[-1] // SPAN

_FUSE = ("contract",)  # one fused multiply-add
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, PANEL)


@intrinsic
def multiply_span(
    typing: Any, x: Any, x_stride: Any, num_rows: Any, weights: Any, weights_stride: Any, count: Any, begin: Any,
    begin_stride: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[SPAN_ROWS, SPAN PANEL] = begin + x[R, count] @ (weights[0][count, PANEL], weights[1]), by address

    Strides are bytes a row; of weights, a panel. R <= SPAN_ROWS: the rows behind R repeat the last. `begin` may be out.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, num_rows, weights, weights_stride, count, begin, begin_stride, out, out_stride = arguments
        tile, rows = _Tile(builder), range(SPAN_ROWS)
        last = builder.sub(num_rows, ir.Constant(_I64, 1))
        x_rows = [tile.pointer(tile.row(x, x_stride, tile.smaller(r, last)), _F32) for r in rows]
        panels = [tile.row(weights, weights_stride, ir.Constant(_I64, i)) for i in range(SPAN)]
        begins, places = (
            [tile.row(base, stride, ir.Constant(_I64, r)) for r in rows]
            for base, stride in ((begin, begin_stride), (out, out_stride))
        )
        tile.multiply(x_rows, panels, count, begins, places)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), codegen


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def multiply(self, x_rows: list[Any], panels: list[Any], count: Any, begins: list[Any], places: list[Any]) -> None:
        builder, columns = self._builder, [4 * PANEL * i for i in range(SPAN)]
        cells = [[cgutils.alloca_once(builder, _VECTOR) for _ in columns] for _ in x_rows]
        for row, begin in zip(cells, begins, strict=True):
            for cell, column in zip(row, columns, strict=True):
                builder.store(builder.load(self._at(begin, column), align=4), cell)
        zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
        with cgutils.for_range_slice(builder, zero, count, one, intp=_I64) as (k, _):
            offset = builder.mul(k, ir.Constant(_I64, 4 * PANEL))
            weights = [builder.load(self.pointer(builder.add(panel, offset), _VECTOR), align=4) for panel in panels]
            for x_row, row in zip(x_rows, cells, strict=True):
                spread = self._spread(x_row, k)
                for cell, each in zip(row, weights, strict=True):
                    product = builder.fmul(spread, each, flags=_FUSE)
                    builder.store(builder.fadd(builder.load(cell), product, flags=_FUSE), cell)
        for row, place in zip(cells, places, strict=True):
            for cell, column in zip(row, columns, strict=True):
                builder.store(builder.load(cell), self._at(place, column), align=4)

    def row(self, base: Any, stride: Any, index: Any) -> Any:
        """The address of one"""
        return self._builder.add(base, self._builder.mul(stride, index))

    def smaller(self, row: int, last: Any) -> Any:
        index = ir.Constant(_I64, row)
        return self._builder.select(self._builder.icmp_signed("<", index, last), index, last)

    def pointer(self, address: Any, what: Any) -> Any:
        return self._builder.inttoptr(address, what.as_pointer())

    def _at(self, address: Any, offset: int) -> Any:
        return self.pointer(self._builder.add(address, ir.Constant(_I64, offset)), _VECTOR)

    def _spread(self, x_row: Any, k: Any) -> Any:
        """x[r, k] everywhere"""
        undefined, lane = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_I32, 0)
        everywhere = ir.Constant(ir.VectorType(_I32, PANEL), None)
        value = self._builder.insert_element(undefined, self._builder.load(self._builder.gep(x_row, [k])), lane)
        return self._builder.shuffle_vector(value, undefined, everywhere)
