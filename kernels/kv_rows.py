"""The values of a paged KV cache, whatever its dtype: shape, and the torch reference of reading and writing."""

import torch
from torch import Tensor

from kvasir.kernels.kv_codec import convert_reference, quantize_reference
from kvasir.kernels.kv_dtypes import SCALE_BYTES

_LOOP_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.int8: "int8"}

# Shapes: N blocks  L layers  K KV heads  B tokens a block  D head dim


def head_dim_of(kv_cache: Tensor) -> int:
    """kv_cache [N, L, 2, K, B, D], or [N, L, 2, K, B, D + SCALE_BYTES] of int8"""
    return kv_cache.shape[-1] - (SCALE_BYTES if kv_cache.dtype == torch.int8 else 0)


def loop_dtype(tokens: Tensor, kv_cache: Tensor) -> str | None:
    """The cache's dtype, if there are compiled loops for it and for what `tokens` is; else None."""
    if tokens.device.type != "cpu" or tokens.dtype != torch.float32 or kv_cache.dtype not in _LOOP_DTYPES:
        return None
    if kv_cache.dtype == torch.float16:
        from kvasir.kernels.cpu.panel_tile import CONVERTS_FLOAT16

        return "float16" if CONVERTS_FLOAT16 else None
    return _LOOP_DTYPES[kv_cache.dtype]


def views_of(kv_cache: Tensor) -> tuple[Tensor, Tensor | None]:
    """kv_cache [..., B, row length], contiguous -> values [..., B, D], scales float32 [..., B] or None; its memory"""
    if kv_cache.dtype != torch.int8:
        return kv_cache, None
    block_size, head_dim = kv_cache.shape[-2], head_dim_of(kv_cache)
    heads = kv_cache.flatten(-2)
    values = heads[..., : block_size * head_dim].view(*kv_cache.shape[:-1], head_dim)
    return values, heads[..., block_size * head_dim :].view(torch.float32)


def read_rows(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks or heads of a cache [..., B, row length] -> values [..., B, D] of `dtype`"""
    values, scales = views_of(blocks)
    return values.to(dtype) if scales is None else (values.float() * scales[..., None]).to(dtype)


def write_rows(kv_cache: Tensor, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """keys, values [T, K, D] of tokens at blocks, offsets [T] -> into kv_cache, converted to its dtype

    To float16, finite values saturate at +-65504. To int8: the largest of a row is 127 scales; a row that holds NaN or
    an infinity becomes NaN.
    """
    cached, scales = views_of(kv_cache)
    for which, rows in enumerate((keys, values)):
        if scales is not None:
            row_scales, rows = quantize_reference(rows.flatten(0, 1).float())
            scales[blocks, layer, which, :, offsets] = row_scales.view(-1, kv_cache.shape[3])
            rows = rows.view(keys.shape)
        elif rows.dtype != cached.dtype:
            rows = convert_reference(rows, cached.dtype)
        cached[blocks, layer, which, :, offsets] = rows
