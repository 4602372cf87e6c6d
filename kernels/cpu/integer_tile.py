"""The register tile of a product of integers: a few rows of quantized activations against one panel of columns.

Both lie in blocks of `BLOCK` inputs. Of each block, products are summed in int32, scaled, and added to sums in float32.
Nothing here may be fused or taken in another order, so that results are the same for any tile on every machine.

A block of a panel has PANEL columns of STEP inputs, then those of the next STEP. Instructions for products of bytes
want one factor without a sign: there, 8-bit codes of a panel are more by 128 than they should be, and each row has in
its block what makes up for it.
"""

from typing import Any

from kvasir.kernels.cpu.compiling import CPU_FEATURES, IS_WIDE, cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.integer_block import BLOCK, BLOCK_WORDS, HAS_BYTE_PRODUCTS, OFFSET_BYTE, SCALE_BYTE, STEP
from kvasir.kernels.cpu.panel_tile import PANEL, ROWS

_LINE_BYTES = 64  # of a cache line
_HAS_PAIR_PRODUCTS = bool(CPU_FEATURES.get("avx512bw" if IS_WIDE else "avx2"))

_LANES = PANEL // 2
_F32, _HALF, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), *map(ir.IntType, (8, 16, 32, 64))
_FLOATS, _INTS, _BOOLS = (ir.VectorType(of, _LANES) for of in (_F32, _I32, ir.IntType(1)))
_HALVES, _CODES = ir.VectorType(_HALF, _LANES), ir.VectorType(_I8, STEP * _LANES)
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
        done = builder.append_basic_block("done")
        for rows in ROWS:
            here, other = builder.append_basic_block(f"rows{rows}"), builder.append_basic_block("more")
            builder.cbranch(builder.icmp_signed("<=", arguments[2], ir.Constant(_I64, rows)), here, other)
            builder.position_at_end(here)
            tile.multiply(rows)
            builder.branch(done)
            builder.position_at_end(other)
        builder.branch(done)
        builder.position_at_end(done)
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
        sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in _VECTORS] for _ in range(rows)]
        for cell in (cell for row in sums for cell in row):
            builder.store(ir.Constant(_FLOATS, None), cell)
        x_rows = [self._row(self._x, self._x_stride, r) for r in range(rows)]
        with cgutils.for_range(builder, self._num_blocks) as loop:
            offset = builder.mul(loop.index, ir.Constant(_I64, 4 * BLOCK_WORDS))
            self._add_block(loop.index, [builder.add(row, offset) for row in x_rows], sums)
        self._write(sums)

    def _add_block(self, block: Any, x_rows: list[Any], sums: list[list[Any]]) -> None:
        builder = self._builder
        panel_bytes = BLOCK * PANEL // (2 if self._is_4_bits else 1)
        panel = builder.add(self._panel, builder.mul(block, ir.Constant(_I64, panel_bytes)))
        ahead = builder.add(self._ahead, builder.mul(block, self._ahead_step))
        offsets = [self._spread(self._load(row, OFFSET_BYTE, _I32)) for row in x_rows]
        is_shifted = HAS_BYTE_PRODUCTS and not self._is_4_bits
        totals = [[offset if is_shifted else ir.Constant(_INTS, None)] * 2 for offset in offsets]
        step_bytes = panel_bytes // (BLOCK // STEP)
        for k in range(BLOCK // STEP):
            for line in range(-(-k * step_bytes // _LINE_BYTES) * _LINE_BYTES, (k + 1) * step_bytes, _LINE_BYTES):
                self._prefetch(ahead, line)
            weights = self._weights(panel, k * step_bytes)
            for row, total in zip(x_rows, totals, strict=True):
                word = self._spread(self._load(row, 4 * k, _I32))
                total[:] = [self._multiply_add(total[v], weights[v], word) for v in _VECTORS]
        num_halves = (2 if self._is_4_bits else 1) * PANEL
        scales = builder.add(self._scales, builder.mul(block, ir.Constant(_I64, 2 * num_halves)))
        steps = [self._halves(scales, 2 * _LANES * v) for v in _VECTORS]
        zeros = [self._halves(scales, 2 * (PANEL + _LANES * v)) for v in _VECTORS] if self._is_4_bits else []
        for row, offset, total, cells in zip(x_rows, offsets, totals, sums, strict=True):
            scale = self._spread(self._load(row, SCALE_BYTE, _F32))
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
            return self._call(name, _INTS, total, weights, builder.bitcast(word, _CODES))
        pairs = ir.VectorType(_I16, 2 * _LANES)
        a, b = builder.sext(weights, pairs), builder.bitcast(word, pairs)
        if _HAS_PAIR_PRODUCTS:
            name = "llvm.x86.avx512.pmaddw.d.512" if IS_WIDE else "llvm.x86.avx2.pmadd.wd"
            return builder.add(total, self._call(name, _INTS, a, b))
        wide = ir.VectorType(_I32, 2 * _LANES)
        products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
        for first in range(2):
            order = ir.Constant(_INTS, [2 * lane + first for lane in range(_LANES)])
            total = builder.add(total, builder.shuffle_vector(products, products, order))
        return total

    def _write(self, sums: list[list[Any]]) -> None:
        builder = self._builder
        width = self._spread(builder.trunc(self._width, _I32))
        alignment, nothing = ir.Constant(_I32, 4), ir.Constant(_FLOATS, None)
        lanes = [ir.Constant(_INTS, [v * _LANES + lane for lane in range(_LANES)]) for v in _VECTORS]
        masks = [builder.icmp_signed("<", each, width) for each in lanes]
        has_bias = builder.icmp_signed("!=", self._bias, ir.Constant(_I64, 0))
        for v, mask in enumerate(masks):
            read = builder.select(has_bias, mask, ir.Constant(_BOOLS, None))
            place = self._at(self._bias, 4 * _LANES * v, _FLOATS)
            bias = self._call(f"llvm.masked.load.v{_LANES}f32.p0", _FLOATS, place, alignment, read, nothing)
            for r, row in enumerate(sums):
                place = self._at(self._row(self._out, self._out_stride, r), 4 * _LANES * v, _FLOATS)
                value = builder.fadd(builder.load(row[v]), bias)
                self._call(f"llvm.masked.store.v{_LANES}f32.p0", ir.VoidType(), value, place, alignment, mask)

    def _row(self, first: Any, stride: Any, r: int) -> Any:
        """The address of row r; of the last one, where there are not as many."""
        builder = self._builder
        last, row = builder.sub(self._num_rows, ir.Constant(_I64, 1)), ir.Constant(_I64, r)
        return builder.add(first, builder.mul(builder.select(builder.icmp_signed("<", row, last), row, last), stride))

    def _spread(self, value: Any) -> Any:
        """To all lanes."""
        vector, first = ir.VectorType(value.type, _LANES), ir.Constant(_I32, 0)
        undefined = ir.Constant(vector, ir.Undefined)
        one = self._builder.insert_element(undefined, value, first)
        return self._builder.shuffle_vector(one, undefined, ir.Constant(_INTS, None))

    def _halves(self, address: Any, offset: int) -> Any:
        return self._builder.fpext(self._load(address, offset, _HALVES, align=2), _FLOATS)

    def _prefetch(self, address: Any, offset: int) -> None:
        options = [ir.Constant(_I32, value) for value in (0, 3, 1)]  # read, keep, data
        self._call("llvm.prefetch.p0", ir.VoidType(), self._at(address, offset, _I8), *options)

    def _load(self, address: Any, offset: int, what: Any, align: int = 4) -> Any:
        return self._builder.load(self._at(address, offset, what), align=align)

    def _at(self, address: Any, offset: int, what: Any) -> Any:
        return self._builder.inttoptr(self._builder.add(address, ir.Constant(_I64, offset)), what.as_pointer())

    def _call(self, name: str, returned: Any, *arguments: Any) -> Any:
        function_type = ir.FunctionType(returned, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self._builder.module, function_type, name)
        return self._builder.call(function, arguments)
