"""The compiled loops of kv_codec: byte planes, dtypes, int8 and fp8, each over the values of one block.

No floating point option is relaxed here, so that every machine makes the same bytes of the same block.
Arguments of each loop are [counter (unused), ...] as `threads.launch` passes them.
"""

from typing import Any

import numpy as np

from kvasir.kernels.cpu.compiling import carray, lazy_loop, strict
from kvasir.kernels.cpu.simd import float32_array, int8_array, uint8_array, uint16_array, uint32_array

u32 = np.uint32

# As float32 bits; of positive values the bits are in the order of the values.
_REST = u32(0x7FFFFFFF)  # all but the sign
_INFINITY = u32(0x7F800000)  # above it are NaN
_ROUNDS_PAST_HALF = u32(0x477FF000)  # 65520, the first that would round to a float16 infinity
_HALF_NORMAL = u32(0x38800000)  # 2^-14, the smallest normal float16
_NAN = u32(0x7FC00000)
_E4M3_NORMAL = u32(0x3C800000)  # 2^-6, the smallest normal float8 e4m3
_TINY = u32(0x0D000000)  # 2^-101: the inverse of a scale below could overflow


@strict
def _split(source: Any, planes: Any, width: Any, size: Any) -> None:
    for i in range(size):
        value = source[i]
        for plane in range(width):
            planes[plane * size + i] = value >> (8 * plane) & 255


@lazy_loop
def split_planes(arguments: Any) -> None:
    """[_, width, number of values, source, planes]"""
    a = carray(arguments, 5)
    width, size = a[1], a[2]
    planes = uint8_array(a[4], (width * size,))
    if width == 4:
        _split(uint32_array(a[3], (size,)), planes, 4, size)
    else:
        _split(uint16_array(a[3], (size,)), planes, 2, size)


@lazy_loop
def merge_planes(arguments: Any) -> None:
    """[_, width, number of values, planes, out]"""
    a = carray(arguments, 5)
    width, size = a[1], a[2]
    planes = uint8_array(a[3], (width * size,))
    if width == 4:
        wide = uint32_array(a[4], (size,))
        for i in range(size):
            low = u32(planes[i] | u32(planes[size + i]) << u32(8))
            high = u32(planes[2 * size + i] | u32(planes[3 * size + i]) << u32(8))
            wide[i] = low | high << u32(16)
    else:
        narrow = uint16_array(a[4], (size,))
        for i in range(size):
            narrow[i] = planes[i] | planes[size + i] << 8


# numba widens all integer arithmetic to 64 bits; each cast to uint32 gives it back to vectors of 32.


@strict
def half_of(bits: Any) -> Any:
    """float32 bits -> float16 bits: to nearest, ties to even; finite values saturate."""
    rest = u32(bits & _REST)
    # Adding one half puts the bits of a value below 2^-14 where a subnormal float16 has them, rounded.
    small = u32(np.float32(np.uint32(rest).view(np.float32) + np.float32(0.5)).view(np.uint32) - u32(0x3F000000))
    normal = u32(u32(rest + u32(0xC8000FFF) + (rest >> u32(13) & u32(1))) >> u32(13))
    half = small if rest < _HALF_NORMAL else normal
    half = u32(0x7BFF) if rest >= _ROUNDS_PAST_HALF else half
    half = u32(0x7C00) if rest == _INFINITY else half
    half = u32(0x7E00) if rest > _INFINITY else half
    return np.uint16(half | bits >> u32(16) & u32(0x8000))


@strict
def _from_half(half: Any) -> Any:
    """float16 bits -> float32 bits, exactly."""
    bits = u32(half)
    rest = u32((bits & u32(0x7FFF)) << u32(13))
    normal = u32(rest + u32(0x38000000))
    small = np.float32(np.uint32(normal + u32(0x800000)).view(np.float32) - np.float32(2**-14)).view(np.uint32)
    wide = small if rest < u32(0x800000) else normal
    wide = u32(rest + u32(0x70000000)) if rest >= u32(0x0F800000) else wide
    return u32(wide | (bits & u32(0x8000)) << u32(16))


@strict
def _bfloat_of(bits: Any) -> Any:
    """float32 bits -> bfloat16 bits: to nearest, ties to even."""
    rounded = u32(u32(bits + u32(0x7FFF) + (bits >> u32(16) & u32(1))) >> u32(16))
    return np.uint16(u32(0x7FC0) if u32(bits & _REST) > _INFINITY else rounded)


@lazy_loop
def float32_to_float16(arguments: Any) -> None:
    """[_, number of values, source, out]; so for all four"""
    a = carray(arguments, 4)
    source, out = uint32_array(a[2], (a[1],)), uint16_array(a[3], (a[1],))
    for i in range(a[1]):
        out[i] = half_of(source[i])


@lazy_loop
def float32_to_bfloat16(arguments: Any) -> None:
    a = carray(arguments, 4)
    source, out = uint32_array(a[2], (a[1],)), uint16_array(a[3], (a[1],))
    for i in range(a[1]):
        out[i] = _bfloat_of(source[i])


@lazy_loop
def float16_to_float32(arguments: Any) -> None:
    a = carray(arguments, 4)
    source, out = uint16_array(a[2], (a[1],)), uint32_array(a[3], (a[1],))
    for i in range(a[1]):
        out[i] = _from_half(source[i])


@lazy_loop
def bfloat16_to_float32(arguments: Any) -> None:
    a = carray(arguments, 4)
    source, out = uint16_array(a[2], (a[1],)), uint32_array(a[3], (a[1],))
    for i in range(a[1]):
        out[i] = u32(source[i]) << u32(16)


@strict
def quantize_row(bits: Any, values: Any, out: Any) -> Any:
    """values float32 [D], `bits` of the same -> out int8 [D], and the row's scale: its largest value is 127 of them."""
    size = len(out)
    largest = u32(0)
    for i in range(size):
        largest = max(largest, u32(bits[i] & _REST))
    if largest >= _INFINITY or largest < _TINY:
        for i in range(size):
            out[i] = 0
        return np.float32(np.nan) if largest >= _INFINITY else np.float32(0)
    scale = np.uint32(largest).view(np.float32) / np.float32(127)
    inverse = np.float32(1) / scale
    for i in range(size):
        out[i] = np.int8(np.int32(np.floor(values[i] * inverse + np.float32(0.5))))
    return scale


@lazy_loop
def quantize(arguments: Any) -> None:
    """[_, number of rows, values a row, source, scales, out]"""
    a = carray(arguments, 6)
    shape = (a[1], a[2])
    values, bits = float32_array(a[3], shape), uint32_array(a[3], shape)
    scales, out = float32_array(a[4], (a[1],)), int8_array(a[5], shape)
    for row in range(a[1]):
        scales[row] = quantize_row(bits[row], values[row], out[row])


@strict
def _dequantize_row(source: Any, scale: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = np.float32(source[i]) * scale


@lazy_loop
def dequantize(arguments: Any) -> None:
    """[_, number of rows, values a row, scales, source, out]"""
    a = carray(arguments, 6)
    shape = (a[1], a[2])
    scales, source, out = float32_array(a[3], (a[1],)), int8_array(a[4], shape), float32_array(a[5], shape)
    for row in range(a[1]):
        _dequantize_row(source[row], scales[row], out[row])


@strict
def _e4m3_of(value: Any) -> Any:
    """float32 in [-448, 448] -> the bits of float8 e4m3: to nearest, ties to even."""
    bits = np.float32(value).view(np.uint32)
    rest = u32(bits & _REST)
    # 3 bits of the mantissa stay, and the exponent's bias goes from 127 to 7.
    normal = u32(u32(u32(rest + u32(0x7FFFF) + (rest >> u32(20) & u32(1))) >> u32(20)) - u32(120 << 3))
    # The last bit of a float32 near 2^14 is 2^-9, the step of all that is below 2^-6: adding 2^14 rounds to it.
    tiny = u32(np.float32(abs(value) + np.float32(16384)).view(np.uint32) - u32(0x46800000))
    return np.uint8((tiny if rest < _E4M3_NORMAL else normal) | bits >> u32(24) & u32(0x80))


@strict
def _from_e4m3(byte: Any) -> Any:
    """The bits of float8 e4m3 -> float32, exactly."""
    bits = u32(byte)
    rest = u32((bits & u32(0x7F)) << u32(20))
    normal = u32(rest + u32(120 << 23))
    small = np.float32(np.uint32(normal + u32(0x800000)).view(np.float32) - np.float32(2**-6)).view(np.uint32)
    wide = small if rest < u32(0x800000) else normal
    wide = _NAN if rest == u32(0x7F00000) else wide
    return np.uint32(wide | (bits & u32(0x80)) << u32(24)).view(np.float32)


@strict
def _quantize_row_e4m3(bits: Any, values: Any, out: Any) -> Any:
    """As `quantize_row`, in float8 e4m3, of which the largest is 448."""
    size = len(out)
    largest = u32(0)
    for i in range(size):
        largest = max(largest, u32(bits[i] & _REST))
    if largest >= _INFINITY or largest < _TINY:
        for i in range(size):  # what is tiny is a zero with its sign
            out[i] = u32(0) if largest >= _INFINITY else bits[i] >> u32(24) & u32(0x80)
        return np.float32(np.nan) if largest >= _INFINITY else np.float32(0)
    scale = np.uint32(largest).view(np.float32) / np.float32(448)
    inverse = np.float32(1) / scale
    for i in range(size):
        out[i] = _e4m3_of(min(max(values[i] * inverse, np.float32(-448)), np.float32(448)))
    return scale


@lazy_loop
def quantize_e4m3(arguments: Any) -> None:
    """[_, number of rows, values a row, source, scales, out]"""
    a = carray(arguments, 6)
    shape = (a[1], a[2])
    values, bits = float32_array(a[3], shape), uint32_array(a[3], shape)
    scales, out = float32_array(a[4], (a[1],)), uint8_array(a[5], shape)
    for row in range(a[1]):
        scales[row] = _quantize_row_e4m3(bits[row], values[row], out[row])


@strict
def _dequantize_row_e4m3(source: Any, scale: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = _from_e4m3(source[i]) * scale


@lazy_loop
def dequantize_e4m3(arguments: Any) -> None:
    """[_, number of rows, values a row, scales, source, out]"""
    a = carray(arguments, 6)
    shape = (a[1], a[2])
    scales, source, out = float32_array(a[3], (a[1],)), uint8_array(a[4], shape), float32_array(a[5], shape)
    for row in range(a[1]):
        _dequantize_row_e4m3(source[row], scales[row], out[row])
