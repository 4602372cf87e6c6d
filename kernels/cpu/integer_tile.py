"""The register tile of a product of integers: a few rows of quantized activations against one panel of columns.

Both lie in blocks of `BLOCK` inputs. Of each block, products are summed in int32, scaled, and added to sums in float32.
Nothing here may be fused or taken in another order, so that results are the same for any tile on every machine.

A block of a panel has PANEL columns of STEP inputs, then those of the next STEP. Instructions for products of bytes
want one factor without a sign: there, 8-bit codes of a panel are more by 128 than they should be, and each row has in
its block what makes up for it.
"""

from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import CPU_FEATURES, IS_WIDE, cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.integer_block import BLOCK, BLOCK_WORDS, HAS_BYTE_PRODUCTS, OFFSET_BYTE, SCALE_BYTE, STEP
from kvasir.kernels.cpu.panel_tile import PANEL, ROWS
from kvasir.kernels.cpu.tile_code import F32, HALF, I8, I16, I32, LINE_BYTES, number

_HAS_PAIR_PRODUCTS = bool(CPU_FEATURES.get("avx512bw" if IS_WIDE else "avx2"))

_LANES = PANEL // 2
_FLOATS, _INTS, _BOOLS = (ir.VectorType(of, _LANES) for of in (F32, I32, ir.IntType(1)))
_HALVES, _CODES = ir.VectorType(HALF, _LANES), ir.VectorType(I8, STEP * _LANES)
_VECTORS = range(2)  # of a panel's columns


@intrinsic
def multiply_blocks(
    typing: Any, x: Any, x_stride: Any, num_rows: Any, panel: Any, address: Any, scales: Any, num_blocks: Any,
    ahead: Any, ahead_step: Any, bias: Any, out: Any, out_stride: Any, width: Any,
) -> Any:  # fmt: skip
    """out[R, width] = x[R] @ panel + bias, by address and row stride in bytes. R <= ROWS[-1], width <= PANEL

    panel:  any array of the panels' type, int8 or uint8 (two codes of 4 bits each); `address` is the panel's own
    scales: of each block PANEL float16 scales (and PANEL zeros behind them, for 4 bits)
    ahead:  address to fetch into the cache, `ahead_step` bytes further with each block
    bias:   [width] float32, or 0
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(builder, panel.dtype == types.uint8, *arguments[:3], *arguments[4:])
        tile_code.by_number_of_rows(builder, arguments[2], ROWS, tile.multiply)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, panel, *[i64] * 9), codegen


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any, is_4_bits: bool, x: Any, x_stride: Any, num_rows: Any, panel: Any, scales: Any,
                 num_blocks: Any, ahead: Any, ahead_step: Any, bias: Any, out: Any, out_stride: Any, width: Any,
                 ) -> None:  # fmt: skip
        self._builder, self._is_4_bits = builder, is_4_bits
        self._x, self._x_stride, self._num_rows = x, x_stride, num_rows
        self._panel, self._scales, self._num_blocks = panel, scales, num_blocks
        self._ahead, self._ahead_step = ahead, ahead_step
        self._bias, self._out, self._out_stride, self._width = bias, out, out_stride, width

    def multiply(self, rows: int) -> None:
        builder = self._builder
        sums = [[tile_code.empty_cell(builder, _FLOATS) for _ in _VECTORS] for _ in range(rows)]
        x_rows = [self._row(self._x, self._x_stride, r) for r in range(rows)]
        with cgutils.for_range(builder, self._num_blocks) as loop:
            offset = builder.mul(loop.index, number(4 * BLOCK_WORDS))
            self._add_block(loop.index, [builder.add(row, offset) for row in x_rows], sums)
        self._write(sums)

    def _add_block(self, block: Any, x_rows: list[Any], sums: list[list[Any]]) -> None:
        builder = self._builder
        panel_bytes = BLOCK * PANEL // (2 if self._is_4_bits else 1)
        panel = builder.add(self._panel, builder.mul(block, number(panel_bytes)))
        ahead = builder.add(self._ahead, builder.mul(block, self._ahead_step))
        offsets = [self._spread(self._load(row, OFFSET_BYTE, I32)) for row in x_rows]
        is_shifted = HAS_BYTE_PRODUCTS and not self._is_4_bits
        totals = [[offset if is_shifted else tile_code.zeros(_INTS)] * 2 for offset in offsets]
        step_bytes = panel_bytes // (BLOCK // STEP)
        for k in range(BLOCK // STEP):
            for line in range(-(-k * step_bytes // LINE_BYTES) * LINE_BYTES, (k + 1) * step_bytes, LINE_BYTES):
                tile_code.fetch(builder, builder.add(ahead, number(line)), cache=1)
            weights = self._weights(panel, k * step_bytes)
            for row, total in zip(x_rows, totals, strict=True):
                word = self._spread(self._load(row, 4 * k, I32))
                total[:] = [self._multiply_add(total[v], weights[v], word) for v in _VECTORS]
        num_halves = (2 if self._is_4_bits else 1) * PANEL
        scales = builder.add(self._scales, builder.mul(block, number(2 * num_halves)))
        steps = [self._halves(scales, 2 * _LANES * v) for v in _VECTORS]
        zeros = [self._halves(scales, 2 * (PANEL + _LANES * v)) for v in _VECTORS] if self._is_4_bits else []
        for row, offset, total, cells in zip(x_rows, offsets, totals, sums, strict=True):
            scale = self._spread(self._load(row, SCALE_BYTE, F32))
            for v in _VECTORS:
                product = builder.sitofp(total[v], _FLOATS)
                if zeros:  # product - zero * sum, with both factors changed by a power of 2
                    zero = builder.fmul(zeros[v], ir.Constant(_FLOATS, [1 / 128] * _LANES))
                    product = builder.fadd(product, builder.fmul(zero, builder.sitofp(offset, _FLOATS)))
                product = builder.fmul(product, builder.fmul(scale, steps[v]))
                builder.store(builder.fadd(builder.load(cells[v]), product), cells[v])

    def _weights(self, panel: Any, offset: int) -> list[Any]:
        """Of the next STEP inputs: _CODES, for each vector of columns"""
        builder = self._builder
        if not self._is_4_bits:
            return [self._load(panel, offset + STEP * _LANES * v, _CODES, align=1) for v in _VECTORS]
        pairs = self._load(panel, offset, _CODES, align=1)
        low, shift = (ir.Constant(_CODES, [value] * STEP * _LANES) for value in (15, 4))
        return [builder.and_(pairs, low), builder.lshr(pairs, shift)]

    def _multiply_add(self, total: Any, weights: Any, word: Any) -> Any:
        """In each lane, total + the sum of STEP products of a weight and a part of the word"""
        builder = self._builder
        if HAS_BYTE_PRODUCTS:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * _LANES}"
            return tile_code.call(builder, name, _INTS, total, weights, builder.bitcast(word, _CODES))
        pairs = ir.VectorType(I16, 2 * _LANES)
        a, b = builder.sext(weights, pairs), builder.bitcast(word, pairs)
        if _HAS_PAIR_PRODUCTS:
            name = "llvm.x86.avx512.pmaddw.d.512" if IS_WIDE else "llvm.x86.avx2.pmadd.wd"
            return builder.add(total, tile_code.call(builder, name, _INTS, a, b))
        wide = ir.VectorType(I32, 2 * _LANES)
        products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
        for first in range(2):
            order = ir.Constant(_INTS, [2 * lane + first for lane in range(_LANES)])
            total = builder.add(total, builder.shuffle_vector(products, products, order))
        return total

    def _write(self, sums: list[list[Any]]) -> None:
        builder = self._builder
        width = self._spread(builder.trunc(self._width, I32))
        alignment, nothing = ir.Constant(I32, 4), tile_code.zeros(_FLOATS)
        lanes = [ir.Constant(_INTS, [v * _LANES + lane for lane in range(_LANES)]) for v in _VECTORS]
        masks = [builder.icmp_signed("<", each, width) for each in lanes]
        has_bias = builder.icmp_signed("!=", self._bias, number(0))
        for v, mask in enumerate(masks):
            read = builder.select(has_bias, mask, tile_code.zeros(_BOOLS))
            place = tile_code.pointer(builder, self._bias, 4 * _LANES * v, _FLOATS)
            bias = tile_code.call(
                builder, f"llvm.masked.load.v{_LANES}f32.p0", _FLOATS, place, alignment, read, nothing
            )
            for r, row in enumerate(sums):
                place = tile_code.pointer(builder, self._row(self._out, self._out_stride, r), 4 * _LANES * v, _FLOATS)
                value = builder.fadd(builder.load(row[v]), bias)
                tile_code.call(
                    builder, f"llvm.masked.store.v{_LANES}f32.p0", ir.VoidType(), value, place, alignment, mask
                )

    def _row(self, first: Any, stride: Any, r: int) -> Any:
        return tile_code.row_or_last(self._builder, first, stride, r, self._num_rows)

    def _spread(self, value: Any) -> Any:
        return tile_code.spread(self._builder, value, _LANES)

    def _halves(self, address: Any, offset: int) -> Any:
        return self._builder.fpext(self._load(address, offset, _HALVES, align=2), _FLOATS)

    def _load(self, address: Any, offset: int, what: Any, align: int = 4) -> Any:
        return tile_code.load(self._builder, address, offset, what, align)
