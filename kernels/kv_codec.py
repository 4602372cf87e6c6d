"""What a KV block's values go through on their way: byte planes, other dtypes, int8, fp8. On buffers in host memory.

Every loop is compiled, runs on the calling thread without Python's lock, and gives the same bytes on every machine.
"""

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.kernels.kv_dtypes import SCALE_BYTES

# Shapes: V values  W bytes a value  R rows  D values a row

Bytes = NDArray[np.uint8]

Quantized = Literal["int8", "e4m3"]

FLOAT16_MAX = 65504.0
INT8_MAX, E4M3_MAX = 127.0, 448.0
_LOOPS = {
    ("float32", "float16"): "float32_to_float16",
    ("float32", "bfloat16"): "float32_to_bfloat16",
    ("float16", "float32"): "float16_to_float32",
    ("bfloat16", "float32"): "bfloat16_to_float32",
}


def split_planes(values: Bytes, planes: Bytes) -> None:
    """values [V W] -> planes [W, V]: the first bytes of all values, then all the second ones, ... W is 2 or 4."""
    width, num_values = planes.shape
    _check_sizes(values, num_values * width, planes, num_values * width)
    _launch("split_planes", width, num_values, _address(values), _address(planes))


def merge_planes(planes: Bytes, values: Bytes) -> None:
    """planes [W, V] -> values [V W]"""
    width, num_values = planes.shape
    _check_sizes(values, num_values * width, planes, num_values * width)
    _launch("merge_planes", width, num_values, _address(planes), _address(values))


def convert(values: Bytes, dtype: str, out: Bytes, out_dtype: str) -> None:
    """values [V W] of `dtype` -> out [V W'] of `out_dtype`; each float32, bfloat16 or float16.

    Rounding is to nearest, ties to even. To float16, finite values saturate at +-65504; infinities and NaN stay, so
    that a forward pass that went wrong is still seen by whoever reads them.
    """
    num_values = len(values) // _width(dtype)
    _check_sizes(values, num_values * _width(dtype), out, num_values * _width(out_dtype))
    if dtype == out_dtype:
        out[:] = values
    elif (dtype, out_dtype) in _LOOPS:
        _launch(_LOOPS[dtype, out_dtype], num_values, _address(values), _address(out))
    else:
        precise = np.empty(4 * num_values, np.uint8)
        convert(values, dtype, precise, "float32")
        convert(precise, "float32", out, out_dtype)


def quantize(values: Bytes, row_size: int, scales: Bytes, out: Bytes, dtype: Quantized = "int8") -> None:
    """values: float32 [R, D] -> scales: float32 [R], out: int8 or e4m3 [R, D], with values = scales * out, about

    The largest absolute value of a row is 127 scales, so the error is half a scale; in e4m3 it is 448 scales, and the
    error a 16th of the value, or half the smallest step. A row that holds NaN or an infinity has scale NaN and comes
    back as NaN, all of it. Rows below 2^-101 are taken for zero.
    """
    num_rows = len(out) // row_size
    _check_sizes(values, 4 * num_rows * row_size, out, num_rows * row_size)
    _check_sizes(values, 4 * num_rows * row_size, scales, 4 * num_rows)
    name = "quantize" if dtype == "int8" else "quantize_e4m3"
    _launch(name, num_rows, row_size, _address(values), _address(scales), _address(out))


def dequantize(scales: Bytes, quantized: Bytes, row_size: int, out: Bytes, dtype: Quantized = "int8") -> None:
    """scales: float32 [R], quantized: int8 or e4m3 [R, D] -> out: float32 [R, D]"""
    num_rows = len(quantized) // row_size
    _check_sizes(quantized, num_rows * row_size, out, 4 * num_rows * row_size)
    _check_sizes(scales, 4 * num_rows, out, 4 * num_rows * row_size)
    name = "dequantize" if dtype == "int8" else "dequantize_e4m3"
    _launch(name, num_rows, row_size, _address(scales), _address(quantized), _address(out))


def split_heads(block: Bytes, block_size: int, row_size: int) -> tuple[Bytes, Bytes]:
    """A block of a cache in int8 -> scales: float32 [R], int8 [R, D], as `quantize` gives them"""
    heads = block.reshape(-1, block_size * (row_size + SCALE_BYTES))
    border = block_size * row_size
    return heads[:, border:].flatten(), heads[:, :border].flatten()


def join_heads(scales: Bytes, quantized: Bytes, block_size: int, row_size: int) -> Bytes:
    """The way back: scales float32 [R], int8 [R, D] -> a block of a cache in int8"""
    heads = quantized.reshape(-1, block_size * row_size), scales.reshape(-1, block_size * SCALE_BYTES)
    return np.concatenate(heads, axis=1).ravel()


def split_planes_reference(values: Tensor) -> Tensor:
    """values [V] of any dtype -> [W, V] uint8"""
    return values.view(torch.uint8).view(-1, values.itemsize).T.contiguous()


def convert_reference(values: Tensor, dtype: torch.dtype) -> Tensor:
    precise = values.float()
    if dtype == torch.float16:
        precise = torch.where(precise.isinf(), precise, precise.clamp(-FLOAT16_MAX, FLOAT16_MAX))
    return precise.to(dtype)


def quantize_reference(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [R, D] float32 -> scales [R], quantized [R, D] int8"""
    scales, scaled = _scaled_reference(values, INT8_MAX)
    return scales, torch.floor(scaled + 0.5).to(torch.int8)


def quantize_e4m3_reference(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [R, D] float32 -> scales [R], quantized [R, D] e4m3"""
    scales, scaled = _scaled_reference(values, E4M3_MAX)
    return scales, scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _scaled_reference(values: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """values [R, D] float32 -> scales [R], values / scales [R, D], the largest of a row being `most`"""
    largest = values.abs().amax(-1)
    is_finite, is_zero = values.isfinite().all(-1), largest < 2**-101
    scales = torch.where(is_finite, torch.where(is_zero, 0.0, largest / most), torch.nan)
    inverse = torch.where(is_finite & ~is_zero, 1 / scales, 0.0)
    return scales, torch.where(is_finite[:, None], values, 0.0) * inverse[:, None]


def _launch(name: str, *arguments: int) -> None:
    # Imported late: where there is a GPU only, nothing compiles loops.
    from kvasir.kernels.cpu import kv_codec, threads

    threads.launch(getattr(kv_codec, name), 1, *arguments)


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _check_sizes(a: Bytes, a_size: int, b: Bytes, b_size: int) -> None:
    """The loops trust their arguments."""
    for array, size in ((a, a_size), (b, b_size)):
        if array.size != size or array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError(f"{size} contiguous bytes expected, got {array.size} of {array.dtype}")


def _address(array: NDArray[Any]) -> int:
    address = array.ctypes.data
    if address % 4:
        raise ValueError("values in memory must be aligned to 4 bytes")
    return address
