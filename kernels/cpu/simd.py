"""What the compiled loops are made of: arrays at addresses, a shared counter, sums of vectors, exp2, tanh."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import IS_WIDE, carray, cgutils, compiled, intrinsic, ir, strict, types
from kvasir.kernels.cpu.tile_code import F32, FUSE, HALF, I32, I64, number

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


@compiled
def empty_in_lines(shape: Any) -> Any:
    """Of float32, from the border of a cache line on: a vector that lies across one takes two loads."""
    size = 1
    for length in shape:
        size *= length
    memory = np.empty(size + tile_code.LINE_BYTES // 4, np.float32)
    first = -memory.ctypes.data % tile_code.LINE_BYTES // 4
    return memory[first : first + size].reshape(shape)


@compiled
def zeros_in_lines(shape: Any) -> Any:
    array = empty_in_lines(shape)
    array[:] = 0
    return array


@intrinsic
def next_piece(typing: Any, counter: Any) -> Any:
    """counter[0]++, atomically over all threads: which piece of work is mine."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], number(1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at `address`; no wait, and no fault where nothing is mapped.

    Into the second cache: the first has room for few requests that are under way, and a loop waits for room.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile_code.fetch(builder, arguments[0], cache=2)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def as_floats(builder: Any, element: Any, value: Any, lanes: int) -> Any:
    """float32, float16 (as uint16) or int8 -> float32: `lanes` of them, or one where that is 0"""

    def many(of: Any) -> Any:
        return ir.VectorType(of, lanes) if lanes else of

    if element == types.float32:
        return value
    if element == types.uint16:
        return builder.fpext(builder.bitcast(value, many(HALF)), many(F32))
    return builder.sitofp(builder.sext(value, many(I32)), many(F32))


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
        address, count = arguments
        return largest_of_rows(builder, [address], count, float("-inf"))[0]

    return types.float32(types.int64, types.int64), codegen


def largest_of_rows(builder: Any, rows: list[Any], count: Any, least: float) -> list[Any]:
    """Of `count` float32 at each of several addresses, and of `least`"""

    def larger(one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)  # the other one where `one` is NaN

    return reduced(builder, rows, count, least, larger, lambda _, place: builder.load(place, align=4))


def reduced(
    builder: Any, rows: list[Any], count: Any, start: float, combine: Callable[[Any, Any], Any],
    take: Callable[[int, Any], Any],
) -> list[Any]:  # fmt: skip
    """Of `count` float32 at each of several addresses: of each lane by itself, then folded, if it is `strict`.

    Of several rows at once, since each step of one waits for the one before.

    take: (which row, place) -> a vector of LANES
    combine: what is new, and what has been combined; of single vectors, then of a vector's halves
    """
    vector = ir.VectorType(F32, LANES)
    cells = [cgutils.alloca_once_value(builder, ir.Constant(vector, [start] * LANES)) for _ in rows]
    with cgutils.for_range_slice(builder, number(0), count, number(LANES), intp=I64) as (i, _):
        for r, (row, cell) in enumerate(zip(rows, cells, strict=True)):
            place = tile_code.pointer(builder, tile_code.row(builder, row, number(4), i), 0, vector)
            builder.store(combine(take(r, place), builder.load(cell)), cell)
    return [_folded(builder, builder.load(cell), combine) for cell in cells]


def _folded(builder: Any, result: Any, combine: Callable[[Any, Any], Any]) -> Any:
    distance = LANES // 2
    while distance:
        order = ir.Constant(ir.VectorType(I32, LANES), [(i + distance) % LANES for i in range(LANES)])
        result = combine(builder.shuffle_vector(result, result, order), result)
        distance //= 2
    return builder.extract_element(result, ir.Constant(I32, 0))


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once where the machine can."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=FUSE), c, flags=FUSE)

    return types.float32(types.float32, types.float32, types.float32), codegen


_EXP2 = (
    1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
    6.931472028550421e-1, 1.0,
)  # fmt: skip


def write_exp2(builder: Any, x: Any) -> Any:
    """2 ** x for float32 x <= 0, or a vector of them, to 2e-7 relative; 0 below 2 ** -126.5; NaN stays NaN."""
    lanes = x.type.count if isinstance(x.type, ir.VectorType) else 0
    integer = ir.VectorType(I32, lanes) if lanes else I32

    def constant(what: Any, value: float) -> Any:
        return ir.Constant(what, [value] * lanes if lanes else value)

    least = constant(x.type, -127.0)
    x = builder.select(builder.fcmp_ordered(">", least, x), least, x)
    # Of so large a sum, the last bits are the nearest whole number + 127: the exponent as floats have it.
    large = constant(x.type, 3 * 2**22 + 127)
    exponent = builder.fadd(x, large)
    f = builder.fsub(x, builder.fsub(exponent, large))
    p = constant(x.type, _EXP2[0])
    for coefficient in _EXP2[1:]:
        p = builder.fadd(builder.fmul(p, f, flags=FUSE), constant(x.type, coefficient), flags=FUSE)
    power = builder.shl(builder.bitcast(exponent, integer), constant(integer, 23))
    return builder.fmul(p, builder.bitcast(power, x.type))


@intrinsic
def _exp2(typing: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return write_exp2(builder, arguments[0])

    return types.float32(types.float32), codegen


@strict
def exp2(x: Any) -> Any:
    """2 ** x for float32 x <= 0, to 2e-7 relative, in a form that compilers vectorise."""
    return _exp2(np.float32(x))


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
