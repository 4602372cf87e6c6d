"""The register tile of a product with a packed weight: a few rows of x against one panel of columns.

A panel holds `PANEL` outputs (columns) for all inputs, input by input, so it is read once and in order. Its numbers are
float32, float16, int8 or pairs of 4 bits; they become float32 on their way into the registers.
"""

import platform
from collections.abc import Sequence
from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import CPU_FEATURES, IS_WIDE, cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.tile_code import F32, HALF, I8, I32, I64, LINE_BYTES, number

PANEL = 32 if IS_WIDE else 16  # columns: two registers
ROWS = (1, 2, 4, 8, 12) if IS_WIDE else (1, 2, 4, 6)  # of a tile; with 12 x 2 (6 x 2) sums in registers
# Without F16C, compilers turn a float16 into a float32 by a call of a function that may not be there.
CONVERTS_FLOAT16 = bool(CPU_FEATURES.get("f16c")) or platform.machine() not in ("x86_64", "AMD64", "i686")

_FLOAT32, _FLOAT16, _INT8, _INT4 = types.float32, types.uint16, types.int8, types.uint8
_UNROLL = {1: 4, 2: 2}  # with few rows, sums of their own for every other input, or each waits for the one before
_INPUTS_SOON = 8  # of a panel: from the second cache into the first before they are multiplied
_VECTOR = ir.VectorType(F32, PANEL)
_NOTHING = number(0)


def input_bytes(kind: Any) -> int:
    """What one input takes in a panel."""
    return {_FLOAT32: 4 * PANEL, _FLOAT16: 2 * PANEL, _INT8: PANEL, _INT4: PANEL // 2}[kind]


@intrinsic
def has_groups(typing: Any, panel: Any) -> Any:
    """Whether inputs have scales; known at compile time: what hangs on it is left out of the other loops."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(panel.dtype in (_INT8, _INT4)))

    return types.boolean(panel), codegen


@intrinsic
def multiply_panel(
    typing: Any, x: Any, x_stride: Any, num_rows: Any, panel: Any, address: Any, scales: Any, scale_bytes: Any,
    group_size: Any, num_inputs: Any, ahead: Any, ahead_step: Any, border: Any, behind: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[R, PANEL] = x[R] @ panel, by address. R <= ROWS[-1]

    x_stride: floats a row; out_stride: bytes  panel: any array of the panels' type; `address` is the panel's own
    scales:   address of PANEL float16 scales (and of PANEL zeros behind them, for 4 bits) of the first group of inputs,
              `scale_bytes` further those of the next
    ahead:    address to fetch into the cache, `ahead_step` bytes further with each input; from input `border` on,
              the address `behind`, and further with each
    """
    kind = panel.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        num_rows = arguments[2]
        x, x_stride, _, _, panel, scales, scale_bytes, group_size, num_inputs, *fetched, out, out_stride = arguments
        tile = _Tile(
            builder, kind, x, x_stride, num_rows, panel, scales, _NOTHING, num_inputs, out=out, out_stride=out_stride,
            fetched=fetched, scale_bytes=scale_bytes, group_size=group_size,
        )  # fmt: skip
        tile_code.by_number_of_rows(builder, num_rows, ROWS, tile.multiply)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, panel, *[i64] * 11), codegen


@intrinsic
def add_part(
    typing: Any, x: Any, x_stride: Any, num_rows: Any, part: Any, num_inputs: Any, ahead: Any, ahead_step: Any,
    sums: Any, sums_stride: Any,
) -> Any:  # fmt: skip
    """sums[R, PANEL] += x[R] @ part, by address. R <= ROWS[-1]

    part: [num_inputs, PANEL] float32, expanded from a panel; it should be in the first cache
    strides: bytes a row  ahead: address to fetch into the cache, `ahead_step` bytes further with each input
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, x_stride, num_rows, part, num_inputs, ahead, ahead_step, sums, sums_stride = arguments

        def add(rows: int) -> None:
            x_rows = [tile_code.row_or_last(builder, x, x_stride, r, num_rows) for r in range(rows)]
            places = [tile_code.row_or_last(builder, sums, sums_stride, r, num_rows) for r in range(rows)]
            _add_part(builder, x_rows, part, num_inputs, ahead, ahead_step, places)

        tile_code.by_number_of_rows(builder, num_rows, ROWS, add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


def _add_part(
    builder: Any, x_rows: list[Any], part: Any, num_inputs: Any, ahead: Any, ahead_step: Any, places: list[Any]
) -> None:
    """Each of the places += the row of x @ part. All are addresses."""
    cells = [cgutils.alloca_once(builder, _VECTOR) for _ in places]
    for cell, place in zip(cells, places, strict=True):
        builder.store(tile_code.load(builder, place, 0, _VECTOR), cell)
    with cgutils.for_range_slice(builder, _NOTHING, num_inputs, number(1), intp=I64) as (k, _):
        tile_code.fetch(builder, tile_code.row(builder, ahead, ahead_step, k), cache=2)
        weights = tile_code.load(builder, tile_code.row(builder, part, number(4 * PANEL), k), 0, _VECTOR)
        for x_row, cell in zip(x_rows, cells, strict=True):
            value = tile_code.load(builder, tile_code.row(builder, x_row, number(4), k), 0, F32)
            tile_code.fuse(builder, cell, tile_code.spread(builder, value, PANEL), weights)
    for cell, place in zip(cells, places, strict=True):
        builder.store(builder.load(cell), tile_code.pointer(builder, place, 0, _VECTOR), align=4)


@intrinsic
def expand_panel(typing: Any, panel: Any, address: Any, scales: Any, first: Any, count: Any, out: Any) -> Any:
    """out[count, PANEL] = panel[first : first + count] as float32, by address; the other arguments as above"""
    kind = panel.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, scales, first, count, out = arguments[1:]
        _Tile(builder, kind, _NOTHING, _NOTHING, _NOTHING, address, scales, first, count, out=out).expand()
        return context.get_dummy_value()

    return types.void(panel, *[types.int64] * 5), codegen


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any, kind: Any, x: Any, x_stride: Any, num_rows: Any, panel: Any, scales: Any,
                 first: Any, count: Any, *, out: Any, out_stride: Any = _NOTHING, fetched: Sequence[Any] = (),
                 scale_bytes: Any = _NOTHING, group_size: Any = _NOTHING) -> None:  # fmt: skip
        self._builder, self._kind = builder, kind
        self._x, self._x_stride, self._num_rows = x, x_stride, num_rows
        self._panel, self._scales, self._first, self._count = panel, scales, first, count
        self._out, self._out_stride = out, out_stride
        self._fetched, self._scale_bytes, self._group_size = fetched, scale_bytes, group_size

    def multiply(self, rows: int) -> None:
        builder, has_groups = self._builder, self._kind in (_INT8, _INT4)
        stride = builder.mul(self._x_stride, number(4))
        x_rows = [tile_code.row_or_last(builder, self._x, stride, r, self._num_rows) for r in range(rows)]
        cells = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(_UNROLL.get(rows, 1))] for _ in range(rows)]
        totals = [tile_code.empty_cell(builder, _VECTOR) for _ in range(rows)] if has_groups else []
        if has_groups:
            scales = cgutils.alloca_once_value(builder, self._scales)
            with cgutils.for_range_slice(builder, _NOTHING, self._count, self._group_size, intp=I64) as (first, _):
                rest = builder.sub(self._count, first)
                is_last = builder.icmp_signed("<", rest, self._group_size)
                count = builder.select(is_last, rest, self._group_size)
                self._multiply_group(x_rows, first, count, builder.load(scales), cells, totals)
                builder.store(builder.add(builder.load(scales), self._scale_bytes), scales)
        else:
            self._add_inputs(x_rows, _NOTHING, self._count, None, cells)
        for r, row in enumerate(cells):
            total = builder.load(totals[r]) if has_groups else self._total(row)
            place = tile_code.row_or_last(builder, self._out, self._out_stride, r, self._num_rows)
            builder.store(total, tile_code.pointer(builder, place, 0, _VECTOR), align=4)

    def _multiply_group(self, x_rows: list[Any], first: Any, count: Any, scales: Any, cells: list[list[Any]],
                        totals: list[Any]) -> None:  # fmt: skip
        builder = self._builder
        zero = self._half_vector(scales, 2 * PANEL) if self._kind == _INT4 else None
        self._add_inputs(x_rows, first, count, zero, cells)
        scale = self._half_vector(scales, 0)
        for row, total in zip(cells, totals, strict=True):
            tile_code.fuse(builder, total, self._total(row), scale)

    def _add_inputs(self, x_rows: list[Any], first: Any, count: Any, zero: Any, cells: list[list[Any]]) -> None:
        """cells[r] = x[r, first : first + count] @ panel[first : first + count], in several parts"""
        builder, unroll = self._builder, len(cells[0])
        for cell in (cell for row in cells for cell in row):
            builder.store(tile_code.zeros(_VECTOR), cell)
        border = builder.add(first, builder.and_(count, number(-unroll)))
        with cgutils.for_range_slice(builder, first, border, number(unroll), intp=I64) as (k, _):
            self._fetch_ahead(k, unroll)
            if unroll == 1:  # a tile of fewer rows waits for memory alone
                self._fetch_soon(k)
            for u in range(unroll):
                self._add(x_rows, builder.add(k, number(u)), zero, [row[u] for row in cells])
        if unroll > 1:
            end = builder.add(first, count)
            with cgutils.for_range_slice(builder, border, end, number(1), intp=I64) as (k, _):
                self._add(x_rows, k, zero, [row[0] for row in cells])

    def expand(self) -> None:
        builder = self._builder
        zero = self._half_vector(self._scales, 2 * PANEL) if self._kind == _INT4 else None
        scale = self._half_vector(self._scales, 0) if self._kind in (_INT8, _INT4) else None
        start, one = number(0), number(1)
        with cgutils.for_range_slice(builder, start, self._count, one, intp=I64) as (k, _):
            weights = self._load_weights(builder.add(self._first, k), zero)
            if scale is not None:
                weights = builder.fmul(weights, scale)
            place = builder.add(self._out, builder.mul(k, number(4 * PANEL)))
            builder.store(weights, tile_code.pointer(builder, place, 0, _VECTOR), align=4)

    def _total(self, cells: list[Any]) -> Any:
        builder = self._builder
        total = builder.load(cells[0])
        for cell in cells[1:]:
            total = builder.fadd(total, builder.load(cell))
        return total

    def _add(self, x_rows: list[Any], k: Any, zero: Any, cells: list[Any]) -> None:
        """cells[r] += x[r, k] * panel[k]"""
        builder = self._builder
        weights = self._load_weights(k, zero)
        for x_row, cell in zip(x_rows, cells, strict=True):
            value = tile_code.load(builder, tile_code.row(builder, x_row, number(4), k), 0, F32)
            tile_code.fuse(builder, cell, tile_code.spread(builder, value, PANEL), weights)

    def _load_weights(self, k: Any, zero: Any) -> Any:
        """As float32, but for the scale."""
        builder = self._builder
        place = builder.add(self._panel, builder.mul(k, number(input_bytes(self._kind))))
        if self._kind == _FLOAT32:
            return self._load(place, 0, _VECTOR)
        if self._kind == _FLOAT16:
            return builder.fpext(self._load(place, 0, ir.VectorType(HALF, PANEL), align=2), _VECTOR)
        if self._kind == _INT8:
            codes = self._load(place, 0, ir.VectorType(I8, PANEL), align=1)
            return builder.sitofp(builder.sext(codes, ir.VectorType(I32, PANEL)), _VECTOR)
        half = PANEL // 2
        narrow = ir.VectorType(I32, half)
        pairs = builder.zext(self._load(place, 0, ir.VectorType(I8, half), align=1), narrow)
        low = builder.and_(pairs, ir.Constant(narrow, [15] * half))
        high = builder.lshr(pairs, ir.Constant(narrow, [4] * half))
        order = ir.Constant(ir.VectorType(I32, PANEL), list(range(PANEL)))
        return builder.fsub(builder.sitofp(builder.shuffle_vector(low, high, order), _VECTOR), zero)

    def _half_vector(self, scales: Any, offset: int) -> Any:
        halves = self._load(scales, offset, ir.VectorType(HALF, PANEL), align=2)
        return self._builder.fpext(halves, _VECTOR)

    def _fetch_soon(self, k: Any) -> None:
        soon = tile_code.row(self._builder, self._panel, number(input_bytes(self._kind)), k)
        for line in range(0, input_bytes(self._kind), LINE_BYTES):
            offset = _INPUTS_SOON * input_bytes(self._kind) + line
            tile_code.fetch(self._builder, self._builder.add(soon, number(offset)), cache=1)

    def _fetch_ahead(self, k: Any, num_inputs: int) -> None:
        builder = self._builder
        ahead, ahead_step, border, behind = self._fetched
        steps = builder.sub(k, border)
        is_behind = builder.icmp_signed(">=", steps, number(0))
        start, steps = builder.select(is_behind, behind, ahead), builder.select(is_behind, steps, k)
        place = tile_code.row(builder, start, ahead_step, steps)
        # Evenly: where several tiles fetch a panel together, what is stepped over is less than the lines of an input.
        num_lines = max(1, num_inputs * input_bytes(self._kind) // LINE_BYTES)
        line_step = builder.udiv(builder.mul(ahead_step, number(num_inputs)), number(num_lines))
        # Into the second cache: the first has room for few requests that are under way, and a tile waits for room.
        for line in range(num_lines):
            tile_code.fetch(builder, tile_code.row(builder, place, line_step, number(line)), cache=2)

    def _load(self, address: Any, offset: int, what: Any, align: int = 4) -> Any:
        return tile_code.load(self._builder, address, offset, what, align)
