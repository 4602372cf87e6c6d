"""Attention of the newest tokens of each sequence, over the paged KV cache, read in place."""

import torch
from torch import Tensor

from kvasir.kernels import backend
from kvasir.kernels.kv_rows import head_dim_of, loop_dtype
from kvasir.kernels.prefill_attention import prefill_attention, prefill_attention_reference

# Shapes: S sequences  Q tokens of each  M blocks of the longest sequence  N blocks  L layers  B tokens a block
#   H query heads  K KV heads  D head dim


def decode_attention(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """query [S Q, >= H D], the last Q tokens of each sequence -> out [S Q, H D]; the same Q for all

    kv_cache: [N, L, 2, K, B, D], of int8 as in `kv_dtypes`
    block_tables: [S, M] int32      seq_lens: [S] int32, the new tokens included
    window: how many tokens each token sees, itself included; 0: all
    softcap: c > 0: scores become c tanh(score / c); 0: as they are
    A sequence of length 0 (the padding of a batch) reads no block, and its rows of `out` become 0.
    """
    assert len(query) % len(seq_lens) == 0
    if backend.is_triton(query) and kv_cache.dtype != torch.int8:
        from kvasir.kernels.triton import decode_attention as triton

        return triton.decode_attention(
            query, kv_cache, layer, block_tables, seq_lens, out, scale=scale, window=window, softcap=softcap
        )
    if (dtype := loop_dtype(query, kv_cache)) is None:
        return decode_attention_reference(
            query, kv_cache, layer, block_tables, seq_lens, out, scale=scale, window=window, softcap=softcap
        )
    from kvasir.kernels.cpu.softmax import CHAINS, TILE_KEYS

    if len(query) > len(seq_lens) or head_dim_of(kv_cache) % CHAINS != 0:
        query_starts = _query_starts(query, seq_lens)
        return prefill_attention(
            query, kv_cache, layer, block_tables, query_starts, seq_lens, out,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
    from kvasir.kernels.cpu import decode_attention as cpu
    from kvasir.kernels.cpu import threads
    from kvasir.kernels.cpu.decode_splits import merge

    num_blocks, num_layers, _, num_kv_heads, block_size, row_length = kv_cache.shape
    head_dim = head_dim_of(kv_cache)
    assert query.stride(1) == 1
    assert kv_cache.is_contiguous()
    assert block_tables.is_contiguous()
    assert out.is_contiguous()
    num_seqs, num_heads = len(seq_lens), out.shape[1] // head_dim
    num_splits = -(-block_tables.shape[1] * block_size // TILE_KEYS)
    partials = out.new_empty((num_seqs, num_splits, num_heads, head_dim + 2) if num_splits > 1 else 0)
    threads.launch(
        {"float32": cpu.over_float32, "float16": cpu.over_float16, "int8": cpu.over_int8}[dtype],
        num_seqs * num_kv_heads * num_splits,
        query.data_ptr(), num_seqs, query.stride(0), num_heads,
        kv_cache.data_ptr(), num_blocks, num_layers, num_kv_heads, block_size, row_length, head_dim, layer,
        block_tables.data_ptr(), block_tables.shape[1], seq_lens.data_ptr(),
        *threads.scales(scale, softcap), window, out.data_ptr(), partials.data_ptr(), num_splits,
        torch.get_num_threads(),
    )  # fmt: skip
    if num_splits > 1:
        threads.launch(
            merge, num_seqs, num_seqs, num_splits, num_heads, head_dim,
            partials.data_ptr(), seq_lens.data_ptr(), window, out.data_ptr(),
        )  # fmt: skip
    return None


def decode_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    query_starts = _query_starts(query, seq_lens)
    prefill_attention_reference(
        query, kv_cache, layer, block_tables, query_starts, seq_lens, out, scale=scale, window=window, softcap=softcap
    )


def _query_starts(query: Tensor, seq_lens: Tensor) -> Tensor:
    tokens_each = len(query) // len(seq_lens)
    return torch.arange(0, len(query) + 1, tokens_each, dtype=torch.int32, device=query.device)
