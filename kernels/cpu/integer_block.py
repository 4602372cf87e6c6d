"""A block of activations as the tiles of integers read it, and how it is made.

    BLOCK codes | float32 scale | int32, -128 times the sum of the codes

STEP codes are one word of 32 bits, which a tile sends to all lanes at once: with instructions for products of bytes
(VNNI) four int8, and without two int16.
"""

from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import CPU_FEATURES, IS_WIDE, intrinsic, ir, types
from kvasir.kernels.cpu.tile_code import F32, I32
from kvasir.kernels.quantized import GROUP_SIZE

BLOCK = GROUP_SIZE
HAS_BYTE_PRODUCTS = bool(CPU_FEATURES.get("avx512vnni" if IS_WIDE else "avxvnni"))
STEP = 4 if HAS_BYTE_PRODUCTS else 2
BLOCK_WORDS = BLOCK // STEP + 2
SCALE_BYTE = 4 * BLOCK // STEP  # where in a block the scale is
OFFSET_BYTE = SCALE_BYTE + 4

_FLOATS, _INTS = ir.VectorType(F32, BLOCK), ir.VectorType(I32, BLOCK)
_CODES = ir.VectorType(ir.IntType(32 // STEP), BLOCK)
_INFINITY = 0x7F800000  # bits of a float32; above it are NaN, and of positive ones the bits are in their order
_TINY = 0x0D000000  # 2 ** -101: the inverse of a scale below could overflow


@intrinsic
def quantize_block(typing: Any, values: Any, block: Any) -> Any:
    """Of BLOCK float32 at one address a block at another one. The same numbers as `kv_codec.quantize_row` makes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, block = arguments

        def spread(value: Any) -> Any:
            return tile_code.spread(builder, value, BLOCK)

        def store(value: Any, byte: int) -> None:
            builder.store(value, tile_code.pointer(builder, block, byte, value.type), align=4)

        values = tile_code.load(builder, source, 0, _FLOATS)
        sizes = builder.and_(builder.bitcast(values, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * BLOCK))
        largest = tile_code.call(builder, f"llvm.vector.reduce.umax.v{BLOCK}i32", I32, sizes)
        is_finite = builder.icmp_unsigned("<", largest, ir.Constant(I32, _INFINITY))
        is_plain = builder.and_(is_finite, builder.icmp_unsigned(">=", largest, ir.Constant(I32, _TINY)))
        one, nothing, nan = (ir.Constant(F32, value) for value in (1.0, 0.0, float("nan")))
        scale = builder.fdiv(builder.bitcast(largest, F32), ir.Constant(F32, 127.0))
        inverse = builder.fdiv(one, builder.select(is_plain, scale, one))
        scaled = builder.fadd(builder.fmul(values, spread(inverse)), ir.Constant(_FLOATS, [0.5] * BLOCK))
        codes = builder.fptosi(tile_code.call(builder, f"llvm.floor.v{BLOCK}f32", _FLOATS, scaled), _INTS)
        codes = builder.select(spread(is_plain), codes, tile_code.zeros(_INTS))
        store(builder.trunc(codes, _CODES), 0)
        store(builder.select(is_plain, scale, builder.select(is_finite, nothing, nan)), SCALE_BYTE)
        total = tile_code.call(builder, f"llvm.vector.reduce.add.v{BLOCK}i32", I32, codes)
        store(builder.mul(total, ir.Constant(I32, -128)), OFFSET_BYTE)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
