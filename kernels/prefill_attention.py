"""Causal attention of prompt chunks over the paged KV cache, read in place."""

import torch
from torch import Tensor

from kvasir.kernels import backend
from kvasir.kernels.kv_rows import head_dim_of, loop_dtype, read_rows

# Shapes: T tokens  S sequences  M blocks of the longest sequence  N blocks  L layers  B tokens a block
#   H query heads  K KV heads  D head dim


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
    """query [T, >= H D], the last tokens of each sequence, end to end -> out [T, H D]

    kv_cache: [N, L, 2, K, B, D], of int8 as in `kv_dtypes`
    block_tables: [S, M] int32      seq_lens: [S] int32, this chunk included
    query_starts: [S + 1] int32, sequence s owns tokens [starts[s], starts[s + 1])
    window: how many tokens each token sees, itself included; 0: all
    softcap: c > 0: scores become c tanh(score / c); 0: as they are
    What lies behind a sequence's end is not read. What lies before the window of all its tokens may be read, and counts
    for nothing if it is finite. A token that sees nothing gets 0.
    """
    if backend.is_triton(query) and kv_cache.dtype != torch.int8:
        from kvasir.kernels.triton import prefill_attention as triton

        return triton.prefill_attention(
            query, kv_cache, layer, block_tables, query_starts, seq_lens, out,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
    if (dtype := loop_dtype(query, kv_cache)) is None:
        return prefill_attention_reference(
            query, kv_cache, layer, block_tables, query_starts, seq_lens, out,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip
    from kvasir.kernels.cpu import prefill_attention as cpu
    from kvasir.kernels.cpu import threads

    num_blocks, num_layers, _, num_kv_heads, block_size, row_length = kv_cache.shape
    head_dim = head_dim_of(kv_cache)
    assert query.stride(1) == 1
    assert kv_cache.is_contiguous()
    assert block_tables.is_contiguous()
    assert out.is_contiguous()
    threads.launch(
        {"float32": cpu.over_float32, "float16": cpu.over_float16, "int8": cpu.over_int8}[dtype],
        len(query) * num_kv_heads,
        query.data_ptr(), len(query), query.stride(0), out.shape[1] // head_dim,
        kv_cache.data_ptr(), num_blocks, num_layers, num_kv_heads, block_size, row_length, head_dim, layer,
        block_tables.data_ptr(), len(seq_lens), block_tables.shape[1], query_starts.data_ptr(), seq_lens.data_ptr(),
        *threads.scales(scale, softcap), window, out.data_ptr(),
    )  # fmt: skip
    return None


def prefill_attention_reference(
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
    num_kv_heads, head_dim = kv_cache.shape[3], head_dim_of(kv_cache)
    num_heads = out.shape[1] // head_dim
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    for s, length in enumerate(lengths):
        first, last = starts[s], starts[s + 1]
        queries = query[first:last, : out.shape[1]].view(-1, num_heads, head_dim).transpose(0, 1)
        blocks = read_rows(kv_cache[block_tables[s].long(), layer], query.dtype)  # [M, 2, K, B, D]
        first_seen = max(length - (last - first) - window + 1, 0) if window else 0
        keys, values = blocks.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, first_seen:length]
        positions = torch.arange(length - (last - first), length, device=query.device)[:, None]
        seen = torch.arange(first_seen, length, device=query.device)[None]
        mask = seen <= positions if window == 0 else (seen <= positions) & (seen > positions - window)
        attended = _attend(queries, keys, values, mask, scale, softcap)
        out[first:last] = attended.masked_fill(~mask.any(1, keepdim=True), 0).transpose(0, 1).flatten(1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """queries [H, T, D], keys and values [K, C, D], mask [T, C] -> [H, T, D]"""
    if softcap == 0:
        return torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )[0]
    keys, values = (kv.repeat_interleave(len(queries) // len(kv), dim=0).float() for kv in (keys, values))
    logits = softcap * torch.tanh(queries.float() @ keys.mT * (scale / softcap))
    weights = logits.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return (weights @ values).to(queries.dtype)
