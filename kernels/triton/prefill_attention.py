# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Causal attention of prompt chunks: a program for each tile of query rows and each KV head.

The chunks have different lengths, and only the GPU knows them. The grid is as large as any lengths with this number
of tokens and sequences may need; a program finds its tile by a prefix sum over the sequences, and the last ones find
nothing. After FlashAttention-2 (Dao 2023), over blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir.kernels.triton import device
from kvasir.kernels.triton.casts import rounded
from kvasir.kernels.triton.paged_tiles import attend, locate

# Shapes: T tokens  S sequences  M blocks of the longest sequence  N blocks  L layers  B tokens a block
#   H query heads  K KV heads  G = H / K  D head dim  ROWS (token, head of the group) pairs of a tile


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """query [T, >= H D] -> out [T, H D], both with any stride between tokens; the cache is contiguous"""
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    group = out.shape[1] // head_dim // num_kv_heads
    assert query.dtype == kv_cache.dtype == out.dtype
    assert query.stride(1) == 1
    assert out.stride(1) == 1
    assert kv_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    if len(query) == 0:
        return
    padded = max(16, triton.next_power_of_2(head_dim))
    rows, tile, num_warps, num_stages = _tiling(padded, kv_cache.dtype, device.capability(query))
    grid = (len(query) * group // rows + len(seq_lens), num_kv_heads)
    _prefill_attention_kernel[grid](
        query, kv_cache[:, layer], block_tables, query_starts, seq_lens, out,
        query.stride(0), kv_cache.stride(0), block_tables.stride(0), out.stride(0), len(seq_lens), scale,
        SOFTCAP=softcap, WINDOW=window, S_PAD=triton.next_power_of_2(len(seq_lens)),
        K=num_kv_heads, G=group, B=block_size, D=head_dim, D_PAD=padded,
        ROWS=rows, TILE=tile, DOT=device.dot_type(kv_cache), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def _tiling(padded_head_dim: int, dtype: torch.dtype, capability: int) -> tuple[int, int, int, int]:
    """ROWS, TILE, warps, stages: no register spills, and at most 99 KB of shared memory.

    From Hopper on the queries are multiplied from shared memory; before, they take registers, and tiles are smaller.
    """
    if dtype == torch.float32:
        return 32 if padded_head_dim <= 128 else 16, 32 if padded_head_dim <= 64 else 16, 8, 2
    if padded_head_dim > 128:
        return 64, 32, 8, 3
    return (128, 64, 8, 3) if capability >= 90 or padded_head_dim <= 64 else (128, 32, 8, 5)


@triton.jit(**device.FEW_VARIANTS)
def _prefill_attention_kernel(
    query_ptr, layer_cache_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr, out_ptr,
    query_stride, block_stride, table_stride, out_stride, num_sequences, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, S_PAD: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, B: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    # Which tile of which sequence
    kv_head = tl.program_id(1)
    s = tl.arange(0, S_PAD)
    starts = tl.load(query_starts_ptr + s, mask=s < num_sequences, other=0)
    ends = tl.load(query_starts_ptr + s + 1, mask=s < num_sequences, other=0)
    sequence, tile = locate(tl.cdiv((ends - starts) * G, ROWS), tl.program_id(0))
    if sequence >= num_sequences:
        return
    start = tl.load(query_starts_ptr + sequence)
    num_tokens = tl.load(query_starts_ptr + sequence + 1) - start
    seq_len = tl.load(seq_lens_ptr + sequence)
    # The last tiles see the most keys: they begin first, so that the short ones fill the gaps at the end.
    row = (tl.cdiv(num_tokens * G, ROWS) - 1 - tile) * ROWS + tl.arange(0, ROWS)
    token = row // G
    positions = seq_len - num_tokens + token
    first_position = tl.min(positions, axis=0)
    last_position = tl.minimum(tl.max(positions, axis=0), seq_len - 1)

    d = tl.arange(0, D_PAD)[None, :]
    mask = (token < num_tokens)[:, None] & (d < D)
    row_tokens = (start + token).to(tl.int64)[:, None]
    head_places = (kv_head * G + row % G)[:, None] * D + d
    q = tl.load(query_ptr + row_tokens * query_stride + head_places, mask=mask, other=0.0).to(DOT)

    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
    acc, _, total = attend(
        q, positions, first_position, last_position, first_key,
        layer_cache_ptr + kv_head * B * D, block_tables_ptr + sequence.to(tl.int64) * table_stride, block_stride,
        K * B * D, first_key // TILE, last_position // TILE + 1, scale, SOFTCAP, WINDOW, B, D, TILE, DOT,
    )  # fmt: skip
    attended = acc / tl.where(total == 0, 1.0, total)[:, None]  # 0: a token before its sequence's first sees nothing
    tl.store(out_ptr + row_tokens * out_stride + head_places, rounded(attended, out_ptr.dtype.element_ty), mask=mask)
