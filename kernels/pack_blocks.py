"""Scattered blocks of the KV cache <-> one staging buffer, a row a block, the codec applied on the way.

    none    | values, as they are                              |
    fp16    | values as float16                                |      finite ones saturate at +-65504
    int8    | scales as float32 [R] | values as int8 [R, D]    |      the largest of a row is 127 scales
    fp8     | scales as float32 [R] | values as e4m3 [R, D]    |      the largest of a row is 448 scales

The bytes are those of `kvasir.kernels.kv_codec`. A row is one token of one head's key or value; rows are in the order
of the cache: layers, keys and values, heads, tokens. A range of heads packs into exactly what a node packs that
holds those heads only, so peers that split the heads differently can serve each other.
"""

from typing import Literal, cast, get_args

import torch
from torch import Tensor

from kvasir.kernels.backend import is_triton
from kvasir.kernels.kv_codec import convert_reference, quantize_e4m3_reference, quantize_reference

# Shapes: N blocks in the cache  P blocks to pack  L layers  K KV heads  B tokens a block  D head dim
#   R rows of a block: L * 2 * (heads in the range) * B

Codec = Literal["none", "fp16", "int8", "fp8"]
_VALUE_BYTES = {"fp16": 2, "int8": 1, "fp8": 1}


def pack_blocks(
    kv_cache: Tensor, blocks: Tensor, staging: Tensor, *, codec: Codec = "none", heads: range | None = None
) -> None:
    """kv_cache [N, L, 2, K, B, D], contiguous -> staging [P, payload bytes] uint8, for blocks [P] int64

    heads: the KV heads to pack, all by default. Rows of staging may lie apart, each aligned to 4 bytes; the
    fastest are those that begin at, and lie apart by, multiples of 32. ValueError: staging of another size, or a codec
    that there is not.
    """
    heads = _checked(kv_cache, blocks, staging, codec, heads)
    if is_triton(kv_cache):
        from kvasir.kernels.triton import pack_blocks as kernel

        return kernel.pack_blocks(kv_cache, blocks, staging, codec, heads)
    return pack_blocks_reference(kv_cache, blocks, staging, codec=codec, heads=heads)


def unpack_blocks(
    staging: Tensor, blocks: Tensor, kv_cache: Tensor, *, codec: Codec = "none", heads: range | None = None
) -> None:
    """The way back: staging [P, payload bytes] uint8 -> these blocks (all different) of kv_cache, in its dtype.

    Other heads, and other blocks, stay as they are.
    """
    heads = _checked(kv_cache, blocks, staging, codec, heads)
    if is_triton(kv_cache):
        from kvasir.kernels.triton import pack_blocks as kernel

        return kernel.unpack_blocks(staging, blocks, kv_cache, codec, heads)
    return unpack_blocks_reference(staging, blocks, kv_cache, codec=codec, heads=heads)


def checked_codec(name: str) -> Codec:
    """ValueError: there is no such codec."""
    for codec in get_args(Codec):
        if name == codec:
            return cast(Codec, codec)
    raise ValueError(f"unknown codec {name!r}; known are {', '.join(get_args(Codec))}")


def payload_bytes(kv_cache: Tensor, codec: Codec, heads: range | None = None) -> int:
    """Of one packed block."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_rows = num_layers * 2 * (num_kv_heads if heads is None else len(heads)) * block_size
    scale_bytes = 4 if codec in ("int8", "fp8") else 0
    return num_rows * (scale_bytes + head_dim * _VALUE_BYTES.get(codec, kv_cache.itemsize))


def views_of(staging: Tensor, codec: Codec, head_dim: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
    """staging [P, payload bytes] -> scales [P, R] float32 or None, values [P, R D]: float16, int8, e4m3 or `dtype`"""
    if codec == "none":
        return None, staging.view(dtype)
    if codec == "fp16":
        return None, staging.view(torch.float16)
    num_rows = staging.shape[1] // (4 + head_dim)
    values = staging[:, 4 * num_rows :].view(torch.int8 if codec == "int8" else torch.float8_e4m3fn)
    return staging[:, : 4 * num_rows].view(torch.float32), values


def pack_blocks_reference(
    kv_cache: Tensor, blocks: Tensor, staging: Tensor, *, codec: Codec = "none", heads: range | None = None
) -> None:
    heads = _all_heads(kv_cache) if heads is None else heads
    head_dim = kv_cache.shape[-1]
    scales, out = views_of(staging, codec, head_dim, kv_cache.dtype)
    values = kv_cache[blocks, :, :, heads.start : heads.stop].reshape(-1, head_dim)  # [P R, D]
    if scales is None:
        converted = values if values.dtype == out.dtype else convert_reference(values, out.dtype)
    else:
        quantize = quantize_reference if codec == "int8" else quantize_e4m3_reference
        row_scales, converted = quantize(values.float())
        scales.copy_(row_scales.view(scales.shape))
    out.view(torch.uint8).copy_(converted.reshape(out.shape).view(torch.uint8))


def unpack_blocks_reference(
    staging: Tensor, blocks: Tensor, kv_cache: Tensor, *, codec: Codec = "none", heads: range | None = None
) -> None:
    heads = _all_heads(kv_cache) if heads is None else heads
    scales, values = views_of(staging, codec, kv_cache.shape[-1], kv_cache.dtype)
    if scales is not None:
        rows = values.view(*scales.shape, kv_cache.shape[-1]).float()
        values = convert_reference((rows * scales[:, :, None]).flatten(1), kv_cache.dtype)
    elif values.dtype != kv_cache.dtype:
        values = convert_reference(values, kv_cache.dtype)
    target = kv_cache[:, :, :, heads.start : heads.stop]
    target[blocks] = values.reshape(len(blocks), *target.shape[1:])


def _all_heads(kv_cache: Tensor) -> range:
    return range(kv_cache.shape[3])


def _checked(kv_cache: Tensor, blocks: Tensor, staging: Tensor, codec: Codec, heads: range | None) -> range:
    """The kernels trust their arguments, but for the block ids, which lie on the device."""
    heads = _all_heads(kv_cache) if heads is None else heads
    checked_codec(codec)
    if heads.step != 1 or not 0 <= heads.start < heads.stop <= kv_cache.shape[3]:
        raise ValueError(f"{heads} is no range of {kv_cache.shape[3]} heads")
    wanted = (len(blocks), payload_bytes(kv_cache, codec, heads))
    if staging.shape != wanted or staging.dtype != torch.uint8:
        raise ValueError(f"staging of {wanted} bytes expected, got {tuple(staging.shape)} of {staging.dtype}")
    if kv_cache.dtype == torch.int8:
        raise ValueError("a cache in int8 is not packed: its scales are where no codec looks for them")
    if blocks.dtype != torch.int64 or not kv_cache.is_contiguous():
        raise ValueError("block ids must be int64, and the cache contiguous")
    return heads
