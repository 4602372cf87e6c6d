"""What `kvasir bench kernels` measures: each kernel in the shapes of an 8B model, with what it must move or compute.

A case is made on a device from a seed, runs once and is checked, and is timed only then.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvasir.bench.lab.kernel_case import HEAD_DIM, HEADS, KV_HEADS, Case, Prepared, close_to
from kvasir.bench.lab.kernel_cases_rows import row_cases
from kvasir.bench.lab.kernel_decode_step import decode_step
from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.prefill_attention import prefill_attention
from kvasir.kernels.write_kv import write_kv, write_kv_reference

# Shapes: S sequences  C tokens of each  T tokens  N blocks  B tokens a block  H query heads  K KV heads  D head dim

BLOCK_SIZE = 16


def _paged(num_sequences: int, context: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """-> kv_cache [N, 1, 2, K, B, D] bfloat16, block_tables [S, M] (blocks in no order), seq_lens [S]"""
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = num_sequences * blocks_each
    shape = (num_blocks, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    kv_cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    tables = torch.randperm(num_blocks, device=device).int().view(num_sequences, blocks_each)
    return kv_cache, tables, torch.full((num_sequences,), context, dtype=torch.int32, device=device)


def _contiguous(kv_cache: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values, each [1, K, C, D]"""
    kv = kv_cache[table.long(), 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return kv[0][None].contiguous(), kv[1][None].contiguous()


def decode_case(num_sequences: int, context: int, device: str) -> Prepared:
    kv_cache, tables, lengths = _paged(num_sequences, context, device)
    query = torch.randn(num_sequences, HEADS * HEAD_DIM, device=device).bfloat16()
    out = torch.full_like(query, torch.nan)

    def run() -> None:
        decode_attention(query, kv_cache, 0, tables, lengths, out, scale=HEAD_DIM**-0.5)

    def check() -> None:
        for row in {0, num_sequences - 1}:
            keys, values = _contiguous(kv_cache, tables[row], context)
            heads = query[row].view(1, HEADS, 1, HEAD_DIM)
            expected = scaled_dot_product_attention(heads.float(), keys.float(), values.float(), enable_gqa=True)
            close_to(out[row], expected.flatten())

    num_bytes = num_sequences * context * 2 * KV_HEADS * HEAD_DIM * 2 + 2 * query.nbytes
    return Prepared(run=run, check=check, amount=num_bytes)


def prefill_case(num_tokens: int, device: str) -> Prepared:
    kv_cache, tables, lengths = _paged(1, num_tokens, device)
    query = torch.randn(num_tokens, HEADS * HEAD_DIM, device=device).bfloat16()
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    out = torch.full_like(query, torch.nan)
    keys, values = _contiguous(kv_cache, tables[0], num_tokens)
    heads = query.view(num_tokens, HEADS, HEAD_DIM).transpose(0, 1)[None].contiguous()
    # The yardstick has its keys and values for each query head, and all of them in one piece.
    keys, values = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (keys, values))

    def run() -> None:
        prefill_attention(query, kv_cache, 0, tables, starts, lengths, out, scale=HEAD_DIM**-0.5)

    def flash() -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(heads, keys, values, is_causal=True)

    def check() -> None:
        expected = scaled_dot_product_attention(heads, keys, values, is_causal=True)
        close_to(out, expected[0].transpose(0, 1).flatten(1))

    flops = 4 * HEADS * HEAD_DIM * num_tokens * (num_tokens + 1) / 2
    return Prepared(run=run, check=check, amount=flops, beside=flash)


def write_kv_case(num_tokens: int, device: str) -> Prepared:
    qkv = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device).bfloat16()
    cos, sin = torch.rand(2, num_tokens, HEAD_DIM // 2, device=device)
    kv_cache, tables, _ = _paged(1, num_tokens, device)
    slots = (tables[0].long()[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[:num_tokens]
    expected_qkv, expected_cache = qkv.clone(), kv_cache.clone()

    def run() -> None:
        write_kv(qkv, cos, sin, slots, kv_cache, 0)

    def check() -> None:
        write_kv_reference(expected_qkv, cos, sin, slots, expected_cache, 0)
        close_to(kv_cache, expected_cache)
        close_to(qkv[:, : HEADS * HEAD_DIM], expected_qkv[:, : HEADS * HEAD_DIM])

    queries = num_tokens * HEADS * HEAD_DIM * 2
    return Prepared(run=run, check=check, amount=qkv.nbytes + queries + kv_cache.nbytes + cos.nbytes + sin.nbytes)


def all_cases() -> list[Case]:
    decodes = [
        Case(
            kernel="decode_attention", shape=f"{size} x {context // 1024}k", wanted=0.85,
            make=partial(decode_case, size, context),
        )
        for size, context in ((64, 1024), (32, 4096), (32, 16_384), (16, 32_768), (16, 131_072))
    ]  # fmt: skip
    prefills = [
        Case(
            kernel="prefill_attention", shape=f"1 x {count // 1024}k", bound="matmul", wanted=0.6,
            make=partial(prefill_case, count),
        )
        for count in (8192, 32_768)
    ]  # fmt: skip
    writes = Case(kernel="write_kv", shape="32k tokens", wanted=0.85, make=partial(write_kv_case, 32_768))
    shape = "8B, 32 x 1k, CUDA graph"
    step = Case(kernel="decode step", shape=shape, wanted=1 / 1.25, make=partial(decode_step, 32, 1024))
    return [*decodes, *prefills, writes, *row_cases(), step]
