"""What the compiled loops are made of: arrays at addresses, a shared counter, sums of vectors, exp2, tanh."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import IS_WIDE, carray, cgutils, compiled, intrinsic, ir, strict, types

LANES = 16 if IS_WIDE else 8  # floats in one register
TILE_ROWS = 4  # queries that a register tile of attention takes at once


def _pointer_to(element: Any) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    def typed(typing: Any, address: Any) -> Any:
        return types.CPointer(element)(types.int64), codegen

    return intrinsic(typed)


_float32_pointer = _pointer_to(types.float32)
_float64_pointer = _pointer_to(types.float64)
_int32_pointer = _pointer_to(types.int32)
_int64_pointer = _pointer_to(types.int64)
_int8_pointer = _pointer_to(types.int8)
_uint8_pointer = _pointer_to(types.uint8)
_uint16_pointer = _pointer_to(types.uint16)
_uint32_pointer = _pointer_to(types.uint32)


@compiled
def float32_array(address: Any, shape: Any) -> Any:
    return carray(_float32_pointer(address), shape)


@compiled
def float64_array(address: Any, shape: Any) -> Any:
    return carray(_float64_pointer(address), shape)


@compiled
def int32_array(address: Any, shape: Any) -> Any:
    return carray(_int32_pointer(address), shape)


@compiled
def int64_array(address: Any, shape: Any) -> Any:
    return carray(_int64_pointer(address), shape)


@compiled
def int8_array(address: Any, shape: Any) -> Any:
    return carray(_int8_pointer(address), shape)


@compiled
def uint8_array(address: Any, shape: Any) -> Any:
    return carray(_uint8_pointer(address), shape)


@compiled
def uint16_array(address: Any, shape: Any) -> Any:
    return carray(_uint16_pointer(address), shape)


@compiled
def uint32_array(address: Any, shape: Any) -> Any:
    return carray(_uint32_pointer(address), shape)


@compiled
def float32_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@compiled
def padded(size: Any, tile: Any) -> Any:
    """`size` rounded up to whole tiles."""
    return (size + tile - 1) // tile * tile


@intrinsic
def next_piece(typing: Any, counter: Any) -> Any:
    """counter[0]++, atomically over all threads: which piece of work is mine."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", arguments[0], one, "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at `address`; no wait, and no fault where nothing is mapped.

    Into the second cache: the first has room for few requests that are under way, and a loop waits for room.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i8, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [i8, i32, i32, i32]), "llvm.prefetch.p0"
        )
        read, keep, data = ir.Constant(i32, 0), ir.Constant(i32, 2), ir.Constant(i32, 1)
        builder.call(function, [builder.inttoptr(arguments[0], i8), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def as_floats(builder: Any, element: Any, value: Any, lanes: int) -> Any:
    """float32, float16 (as uint16) or int8 -> float32: `lanes` of them, or one where that is 0"""

    def many(of: Any) -> Any:
        return ir.VectorType(of, lanes) if lanes else of

    if element == types.float32:
        return value
    if element == types.uint16:
        return builder.fpext(builder.bitcast(value, many(ir.HalfType())), many(ir.FloatType()))
    return builder.sitofp(builder.sext(value, many(ir.IntType(32))), many(ir.FloatType()))


@intrinsic
def widened(typing: Any, value: Any) -> Any:
    """A float32, a float16 (as uint16) or an int8 as float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return as_floats(builder, signature.args[0], arguments[0], 0)

    return types.float32(value), codegen


@intrinsic
def pointer_like(typing: Any, array: Any, address: Any) -> Any:
    """To elements of the array's type."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array, types.int64), codegen


@intrinsic
def largest_of(typing: Any, address: Any, count: Any) -> Any:
    """The largest of `count` float32, a multiple of LANES; NaN are passed over. -inf of none"""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        f32, i32, i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(f32, LANES)
        cell = cgutils.alloca_once_value(builder, ir.Constant(vector, [float("-inf")] * LANES))

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        base = builder.inttoptr(arguments[0], f32.as_pointer())
        zero, step = ir.Constant(i64, 0), ir.Constant(i64, LANES)
        with cgutils.for_range_slice(builder, zero, arguments[1], step, intp=i64) as (i, _):
            values = builder.load(builder.bitcast(builder.gep(base, [i]), vector.as_pointer()), align=4)
            builder.store(larger(values, builder.load(cell)), cell)
        largest, distance = builder.load(cell), LANES // 2
        while distance:
            order = ir.Constant(ir.VectorType(i32, LANES), [(i + distance) % LANES for i in range(LANES)])
            largest = larger(builder.shuffle_vector(largest, largest, order), largest)
            distance //= 2
        return builder.extract_element(largest, ir.Constant(i32, 0))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def sum_of(typing: Any, address: Any, count: Any) -> Any:
    """The sum of `count` float32, a multiple of LANES: of each lane by itself, then folded, if it is `strict`."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        f32, i32, i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
        vector = ir.VectorType(f32, LANES)
        cell = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
        base = builder.inttoptr(arguments[0], f32.as_pointer())
        zero, step = ir.Constant(i64, 0), ir.Constant(i64, LANES)
        with cgutils.for_range_slice(builder, zero, arguments[1], step, intp=i64) as (i, _):
            values = builder.load(builder.bitcast(builder.gep(base, [i]), vector.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(cell), values), cell)
        total, distance = builder.load(cell), LANES // 2
        while distance:
            order = ir.Constant(ir.VectorType(i32, LANES), [(i + distance) % LANES for i in range(LANES)])
            total = builder.fadd(total, builder.shuffle_vector(total, total, order))
            distance //= 2
        return builder.extract_element(total, ir.Constant(i32, 0))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once where the machine can."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    return types.float32(types.float32, types.float32, types.float32), codegen


@strict
def exp2(x: Any) -> Any:
    """2 ** x for float32 x <= 0, to 2e-7 relative, in a form that compilers vectorise."""
    x = max(x, np.float32(-126))
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = fused(np.float32(1.535336188319500e-4), f, np.float32(1.339887440266574e-3))
    p = fused(p, f, np.float32(9.618437357674640e-3))
    p = fused(p, f, np.float32(5.550332471162809e-2))
    p = fused(p, f, np.float32(2.402264791363012e-1))
    p = fused(p, f, np.float32(6.931472028550421e-1))
    p = fused(p, f, np.float32(1))
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@strict
def tanh(x: Any) -> Any:
    """For float32, to 2e-7, in a form that compilers vectorise; NaN stays NaN."""
    size = abs(x)
    e = exp2(size * np.float32(-2.8853900817779268))  # e ** (-2 size)
    large = (np.float32(1) - e) / (np.float32(1) + e)
    square = x * x
    p = fused(np.float32(62 / 2835), square, np.float32(-17 / 315))
    p = fused(p, square, np.float32(2 / 15))
    p = fused(p, square, np.float32(-1 / 3))
    small = fused(x * square, p, x)  # where the difference above would cancel
    return (large if x > np.float32(0) else -large) if size >= np.float32(0.3) else small
