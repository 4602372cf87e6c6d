"""A block of activations as the tiles of integers read it, and how it is made.

    BLOCK codes | float32 scale | int32, -128 times the sum of the codes

STEP codes are one word of 32 bits, which a tile sends to all lanes at once: with instructions for products of bytes
(VNNI) four int8, and without two int16.
"""

from typing import Any

from kvasir.kernels.cpu.compiling import CPU_FEATURES, IS_WIDE, cgutils, intrinsic, ir, types
from kvasir.kernels.quantized import GROUP_SIZE

BLOCK = GROUP_SIZE
HAS_BYTE_PRODUCTS = bool(CPU_FEATURES.get("avx512vnni" if IS_WIDE else "avxvnni"))
STEP = 4 if HAS_BYTE_PRODUCTS else 2
BLOCK_WORDS = BLOCK // STEP + 2
SCALE_BYTE = 4 * BLOCK // STEP  # where in a block the scale is
OFFSET_BYTE = SCALE_BYTE + 4

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_F32, BLOCK), ir.VectorType(_I32, BLOCK)
_CODES = ir.VectorType(ir.IntType(32 // STEP), BLOCK)
_INFINITY = 0x7F800000  # bits of a float32; above it are NaN, and of positive ones the bits are in their order
_TINY = 0x0D000000  # 2 ** -101: the inverse of a scale below could overflow


@intrinsic
def quantize_block(typing: Any, values: Any, block: Any) -> Any:
    """Of BLOCK float32 at one address a block at another one. The same numbers as `kv_codec.quantize_row` makes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, block = arguments

        def call(name: str, returned: Any, argument: Any) -> Any:
            function_type = ir.FunctionType(returned, [argument.type])
            return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [argument])

        def spread(value: Any) -> Any:
            undefined = ir.Constant(ir.VectorType(value.type, BLOCK), ir.Undefined)
            one = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
            return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, None))

        def store(value: Any, byte: int) -> None:
            place = builder.add(block, ir.Constant(block.type, byte))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)

        values = builder.load(builder.inttoptr(source, _FLOATS.as_pointer()), align=4)
        sizes = builder.and_(builder.bitcast(values, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * BLOCK))
        largest = call(f"llvm.vector.reduce.umax.v{BLOCK}i32", _I32, sizes)
        is_finite = builder.icmp_unsigned("<", largest, ir.Constant(_I32, _INFINITY))
        is_plain = builder.and_(is_finite, builder.icmp_unsigned(">=", largest, ir.Constant(_I32, _TINY)))
        one, nothing, nan = (ir.Constant(_F32, value) for value in (1.0, 0.0, float("nan")))
        scale = builder.fdiv(builder.bitcast(largest, _F32), ir.Constant(_F32, 127.0))
        inverse = builder.fdiv(one, builder.select(is_plain, scale, one))
        scaled = builder.fadd(builder.fmul(values, spread(inverse)), ir.Constant(_FLOATS, [0.5] * BLOCK))
        codes = builder.fptosi(call(f"llvm.floor.v{BLOCK}f32", _FLOATS, scaled), _INTS)
        codes = builder.select(spread(is_plain), codes, ir.Constant(_INTS, None))
        store(builder.trunc(codes, _CODES), 0)
        store(builder.select(is_plain, scale, builder.select(is_finite, nothing, nan)), SCALE_BYTE)
        total = call(f"llvm.vector.reduce.add.v{BLOCK}i32", _I32, codes)
        store(builder.mul(total, ir.Constant(_I32, -128)), OFFSET_BYTE)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
