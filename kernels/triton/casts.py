# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""From float32 to narrower types and back, where Triton's own casts will not do."""

import triton
import triton.language as tl

from kvasir.kernels.backend import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())

_REST = tl.constexpr(0x7FFFFFFF)  # of float32 bits, all but the sign


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 -> dtype, to nearest, ties to even. The interpreter would cut off what bfloat16 has no room for."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return tl.where(values == values, near, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - what follows a constant condition is compiled all the same
        return values.to(dtype)


@triton.jit
def float16_bits(values):
    """float32 -> the bits of float16, as the codec has them: finite values saturate, NaN keeps nothing but its sign."""
    bits = values.to(tl.int32, bitcast=True)
    finite = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
    halves = tl.where((bits & _REST) < 0x7F800000, finite, values).to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where((bits & _REST) > 0x7F800000, (bits >> 16 & 0x8000 | 0x7E00).to(tl.int16), halves)


@triton.jit
def e4m3_bits(values, IS_NATIVE: tl.constexpr):
    """float32 in [-448, 448] -> the bits of float8 e4m3, to nearest, ties to even."""
    if IS_NATIVE:
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:  # noqa: RET505
        bits = values.to(tl.int32, bitcast=True)
        rest = bits & _REST
        # 3 bits of the mantissa stay, and the exponent's bias goes from 127 to 7.
        normal = ((rest + 0x7FFFF + (rest >> 20 & 1)) >> 20) - (120 << 3)
        # The last bit of a float32 near 2^14 is 2^-9, the step of all that is below 2^-6: adding 2^14 rounds to it.
        tiny = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        return (tl.where(rest < 0x3C800000, tiny, normal) | (bits >> 24 & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(bits):
    """The bits of float8 e4m3 (no NaN among them) -> float16, exactly.

    Moved to where float16 has exponent and mantissa, they are the value but for the bias, 7 instead of 15; subnormal
    ones, too. So this needs no machine that knows the type.
    """
    wide = bits.to(tl.int16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return moved.to(tl.float16, bitcast=True) * 256.0
