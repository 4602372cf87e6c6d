"""Rotates the step's queries and keys to their positions, and puts keys and values into the paged cache."""

import torch
from torch import Tensor

# Shapes: T tokens  N blocks  L layers  B tokens a block  H query heads  K KV heads  D head dim


def write_kv(qkv: Tensor, cos: Tensor | None, sin: Tensor | None, slots: Tensor, kv_cache: Tensor, layer: int) -> None:
    """qkv [T, (H + 2 K) D]: queries, keys, values of each token. Queries (and keys) are rotated in place.

    cos, sin: [T, D / 2] float32, of each token's position; None: no rotation
    slots: [T] int64, block * B + offset      kv_cache: [N, L, 2, K, B, D], updated in place
    """
    if qkv.device.type != "cpu" or qkv.dtype != torch.float32 or kv_cache.dtype != torch.float32:
        return write_kv_reference(qkv, cos, sin, slots, kv_cache, layer)
    from kvasir.kernels.cpu import rows, threads

    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert qkv.is_contiguous()
    assert kv_cache.is_contiguous()
    assert slots.dtype == torch.int64
    assert cos is None or (cos.is_contiguous() and cos.shape == (num_tokens, head_dim // 2))
    threads.launch(
        rows.write_kv, -(-num_tokens // rows.ROWS_A_PIECE),
        num_tokens, qkv.data_ptr(), num_heads, 0 if cos is None else cos.data_ptr(),
        0 if sin is None else sin.data_ptr(), slots.data_ptr(), layer,
        kv_cache.data_ptr(), num_blocks, num_layers, num_kv_heads, block_size, head_dim,
    )  # fmt: skip
    return None


def write_kv_reference(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, slots: Tensor, kv_cache: Tensor, layer: int
) -> None:
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    if cos is not None and sin is not None:
        rotated = heads[:, :-num_kv_heads]  # queries and keys
        rotated.copy_(apply_rope_reference(rotated, cos, sin))
    keys, values = heads[:, -2 * num_kv_heads :].chunk(2, dim=1)  # [T, K, D]
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, layer, 0, :, offsets] = keys
    kv_cache[blocks, layer, 1, :, offsets] = values


def apply_rope_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [T, H, D] -> the same, dimension d rotated with dimension d + D / 2 by the angle of cos, sin [T, D / 2]"""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
