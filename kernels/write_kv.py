"""Rotates the step's queries and keys to their positions, and puts keys and values into the paged cache."""

import torch
from torch import Tensor

from kvasir.kernels import backend
from kvasir.kernels.kv_rows import head_dim_of, loop_dtype, write_rows

# Shapes: T tokens  N blocks  L layers  B tokens a block  H query heads  K KV heads  D head dim
#   R rotated dimensions of a head


def write_kv(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    kv_cache: Tensor,
    layer: int,
    *,
    interleaved: bool = False,
) -> None:
    """qkv [T, (H + 2 K) D]: queries, keys, values of each token. Queries are rotated in place.

    cos, sin: [T, R / 2] float32, of each token's position; None: no rotation. The first R <= D dimensions of a head
        are rotated: dimension d with d + R / 2; `interleaved`: 2 d with 2 d + 1
    slots: [T] int64, block * B + offset; -1: not written (padding)
    kv_cache: [N, L, 2, K, B, D], of int8 as in `kv_dtypes`; updated in place, converted to its dtype. To float16,
        finite values saturate at +-65504. To int8: the largest of a row is 127 scales; what is not finite makes it NaN
    What the keys in `qkv` are afterwards, rotated or as before, is not defined.
    """
    if backend.is_triton(qkv) and kv_cache.dtype != torch.int8:
        from kvasir.kernels.triton import write_kv as triton

        return triton.write_kv(qkv, cos, sin, slots, kv_cache, layer, interleaved=interleaved)
    dtype = loop_dtype(qkv, kv_cache)
    if dtype is None or interleaved:
        return write_kv_reference(qkv, cos, sin, slots, kv_cache, layer, interleaved=interleaved)
    from kvasir.kernels.cpu import rows, threads

    num_blocks, num_layers, _, num_kv_heads, block_size, row_length = kv_cache.shape
    head_dim = head_dim_of(kv_cache)
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.is_contiguous()
    assert kv_cache.is_contiguous()
    assert slots.dtype == torch.int64
    half = 0 if cos is None else cos.shape[1]
    assert cos is None or (cos.is_contiguous() and cos.shape == (num_tokens, half) and 2 * half <= head_dim)
    threads.launch(
        {"float32": rows.write_kv_float32, "float16": rows.write_kv_float16, "int8": rows.write_kv_int8}[dtype],
        -(-num_tokens // rows.ROWS_A_PIECE),
        num_tokens, qkv.data_ptr(), num_heads, 0 if cos is None else cos.data_ptr(),
        0 if sin is None else sin.data_ptr(), slots.data_ptr(), layer,
        kv_cache.data_ptr(), num_blocks, num_layers, num_kv_heads, block_size, row_length, head_dim, half,
    )  # fmt: skip
    return None


def write_kv_reference(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    kv_cache: Tensor,
    layer: int,
    *,
    interleaved: bool = False,
) -> None:
    num_kv_heads, block_size, head_dim = kv_cache.shape[3], kv_cache.shape[4], head_dim_of(kv_cache)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    if cos is not None and sin is not None:
        rotated = heads[:, :-num_kv_heads, : 2 * cos.shape[1]]  # of queries and keys
        rotated.copy_(apply_rope_reference(rotated, cos, sin, interleaved))
    keys, values = heads[:, -2 * num_kv_heads :].chunk(2, dim=1)  # [T, K, D]
    is_kept = slots >= 0
    blocks, offsets = slots[is_kept] // block_size, slots[is_kept] % block_size
    write_rows(kv_cache, layer, blocks, offsets, keys[is_kept], values[is_kept])


def apply_rope_reference(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """heads [T, H, R] -> the same, each pair of dimensions rotated by the angle of cos, sin [T, R / 2]"""
    values = heads.float()
    x, y = (values[..., ::2], values[..., 1::2]) if interleaved else values.chunk(2, dim=-1)  # [T, H, R / 2]
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((x * cos - y * sin, y * cos + x * sin), dim=-1 if interleaved else -2)
    return rotated.flatten(-2).to(heads.dtype)
