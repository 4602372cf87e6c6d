# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""pack_blocks and unpack_blocks on a GPU: each value is read once and written once, codec and all.

    cache      block 7 | L0 keys: head 0 | head 1 | head 2 | L0 values: head 0 | head 1 | head 2 | L1 ...
                                  <------ range ----->                  <------ range ----->
    staging    | head 1 | head 2 | head 1 | head 2 | ...        a run a layer, of keys or of values

    program    ROWS rows of D values of one block: contiguous in staging, and in the cache but for steps between runs

A row is a token of a head, with a scale of its own, so that a program needs nothing from another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.pack_blocks import Codec, views_of
from kvasir.kernels.triton.casts import e4m3_bits, e4m3_values, float16_bits, rounded
from kvasir.kernels.triton.device import capability

# Shapes: P blocks to pack  R rows of a block  D head dim

_VALUES_A_PROGRAM = 8192  # 64 a thread: eight loads of 16 bytes under way for 16-bit values
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # what is not to be changed is moved as integers

_RAW = tl.constexpr(0)
_FP16 = tl.constexpr(1)
_INT8 = tl.constexpr(2)
_FP8 = tl.constexpr(3)


def pack_blocks(kv_cache: Tensor, blocks: Tensor, staging: Tensor, codec: Codec, heads: range) -> None:
    """As in `kvasir.kernels.pack_blocks`, where the arguments have been checked."""
    _launch(_pack_kernel, kv_cache, blocks, staging, codec, heads)


def unpack_blocks(staging: Tensor, blocks: Tensor, kv_cache: Tensor, codec: Codec, heads: range) -> None:
    _launch(_unpack_kernel, kv_cache, blocks, staging, codec, heads)


def _launch(kernel, kv_cache: Tensor, blocks: Tensor, staging: Tensor, codec: Codec, heads: range) -> None:
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    scales, values = views_of(staging, codec, head_dim, kv_cache.dtype)
    kind = {"fp16": _FP16, "int8": _INT8, "fp8": _FP8}.get(codec, _RAW).value
    if kv_cache.dtype == values.dtype:
        kind = _RAW.value
    if kind == _RAW.value:
        kv_cache = kv_cache.view(_BITS[kv_cache.itemsize])
    values = values.view(_BITS[values.itemsize]) if kind != _INT8.value else values
    num_rows = values.shape[1] // head_dim
    width = triton.next_power_of_2(head_dim)
    rows = max(_VALUES_A_PROGRAM // width, 1)
    pieces = triton.cdiv(num_rows, rows)
    kernel[(len(blocks) * pieces,)](
        kv_cache, blocks, values if scales is None else scales, values,
        pieces, num_rows, kv_cache.stride(0), 0 if scales is None else scales.stride(0), values.stride(0),
        len(heads) * block_size, num_kv_heads * block_size, heads.start * block_size,
        CODEC=kind, IS_NATIVE_FP8=capability(kv_cache) >= 89, HEAD_DIM=head_dim, ROWS=rows, BLOCK_D=width,
        num_warps=4, enable_fp_fusion=False,  # a product and a sum in one rounding would not give the codec's bytes
    )  # fmt: skip


@triton.jit
def _rows_in_cache(rows, run, run_in_cache, first):
    """Of a block's rows in staging: their rows in the cache.  run 2, run_in_cache 3, first 1: [0, 1, 2] -> [1, 2, 4]"""
    return rows // run * run_in_cache + first + rows % run


@triton.jit
def _row_scale(values, LARGEST: tl.constexpr):
    """[ROWS, D] float32 -> scale [ROWS], inverse [ROWS], is finite [ROWS]. See `kvasir.kernels.kv_codec.quantize`."""
    # Of values without their sign the bits are in the order of the values; those of NaN are above all.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_finite = largest < 0x7F800000
    is_usual = is_finite & (largest >= 0x0D000000)  # 2^-101: the inverse of a scale below could overflow
    scale = tl.div_rn(tl.where(is_usual, largest, 0x3F800000).to(tl.float32, bitcast=True), LARGEST)
    # A row below, or not finite, counts as one whose largest is 1, and gives nothing but zeros.
    return tl.where(is_finite, tl.where(is_usual, scale, 0.0), float("nan")), tl.div_rn(1.0, scale), is_finite


@triton.jit
def _pack_kernel(
    cache_ptr, blocks_ptr, scales_ptr, values_ptr, pieces, num_rows, cache_stride, scales_stride, values_stride,
    run, run_in_cache, first, CODEC: tl.constexpr, IS_NATIVE_FP8: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    index = (tl.program_id(0) // pieces).to(tl.int64)  # which of the blocks
    rows = tl.program_id(0) % pieces * ROWS + tl.arange(0, ROWS)  # [ROWS]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < num_rows)[:, None] & (dims < HEAD_DIM)
    block = tl.load(blocks_ptr + index).to(tl.int64)
    sources = _rows_in_cache(rows, run, run_in_cache, first)
    values = tl.load(cache_ptr + block * cache_stride + sources[:, None] * HEAD_DIM + dims, mask=mask, other=0)
    values_ptrs = values_ptr + index * values_stride + rows[:, None] * HEAD_DIM + dims
    if CODEC == _RAW:
        tl.store(values_ptrs, values, mask=mask)
    elif CODEC == _FP16:
        tl.store(values_ptrs, float16_bits(values.to(tl.float32)), mask=mask)
    else:
        values = values.to(tl.float32)
        if CODEC == _INT8:
            scale, inverse, is_finite = _row_scale(values, 127.0)
        else:
            scale, inverse, is_finite = _row_scale(values, 448.0)
        scaled = tl.where(is_finite[:, None], values, 0.0) * inverse[:, None]
        if CODEC == _INT8:
            tl.store(values_ptrs, tl.floor(scaled + 0.5).to(tl.int8), mask=mask)
        else:
            scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
            tl.store(values_ptrs, e4m3_bits(scaled, IS_NATIVE_FP8), mask=mask)
        tl.store(scales_ptr + index * scales_stride + rows, scale, mask=rows < num_rows)


@triton.jit
def _unpack_kernel(
    cache_ptr, blocks_ptr, scales_ptr, values_ptr, pieces, num_rows, cache_stride, scales_stride, values_stride,
    run, run_in_cache, first, CODEC: tl.constexpr, IS_NATIVE_FP8: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    index = (tl.program_id(0) // pieces).to(tl.int64)
    rows = tl.program_id(0) % pieces * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < num_rows)[:, None] & (dims < HEAD_DIM)
    block = tl.load(blocks_ptr + index).to(tl.int64)
    targets = _rows_in_cache(rows, run, run_in_cache, first)
    cache_ptrs = cache_ptr + block * cache_stride + targets[:, None] * HEAD_DIM + dims
    values = tl.load(values_ptr + index * values_stride + rows[:, None] * HEAD_DIM + dims, mask=mask, other=0)
    if CODEC == _RAW:
        tl.store(cache_ptrs, values, mask=mask)
    else:
        if CODEC == _FP16:
            values = values.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            scale = tl.load(scales_ptr + index * scales_stride + rows, mask=rows < num_rows, other=0.0)
            if CODEC == _FP8:
                values = e4m3_values(values)
            values = values.to(tl.float32) * scale[:, None]
        if cache_ptr.dtype.element_ty == tl.float16:
            tl.store(cache_ptrs, float16_bits(values).to(tl.float16, bitcast=True), mask=mask)
        else:
            tl.store(cache_ptrs, rounded(values, cache_ptr.dtype.element_ty), mask=mask)
