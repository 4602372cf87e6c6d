"""A paged KV cache with sequences scattered over it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvasir.kernels.kv_codec import convert_reference, quantize_reference
from kvasir.kernels.kv_dtypes import SCALE_BYTES
from kvasir.kernels.kv_rows import head_dim_of, views_of

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Paged:
    """Sequences with `lengths` tokens, of which the last `num_new` are this step's."""

    query: Tensor  # [T, (H + 2 K) D], as the fused product gives it
    kv_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    width: int  # H D

    @property
    def scale(self) -> float:
        return float(head_dim_of(self.kv_cache) ** -0.5)

    def in_dtype(self, dtype: torch.dtype) -> "Paged":
        """The same sequences, with the cache in another dtype."""
        return replace(self, kv_cache=in_dtype(self.kv_cache, dtype))


def paged(lengths: list[int], num_new: list[int], *, heads: int, kv_heads: int, head_dim: int, block: int) -> Paged:
    generator = torch.Generator().manual_seed(sum(lengths) + heads + head_dim + block)
    blocks = [-(-length // block) for length in lengths]
    num_blocks = sum(blocks) + 2
    kv_cache = torch.randn(num_blocks, NUM_LAYERS, 2, kv_heads, block, head_dim, generator=generator)
    order = torch.randperm(num_blocks, generator=generator).int().tolist()
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    kv_cache[order] = torch.nan  # whoever reads a block of nobody will show it, or what an earlier owner left
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        kv_cache[tables[row, count - 1], :, :, :, length - (count - 1) * block :] = torch.nan
    query = torch.randn(sum(num_new), (heads + 2 * kv_heads) * head_dim, generator=generator)
    starts = torch.tensor([0, *num_new]).cumsum(0).int()
    return Paged(query, kv_cache, tables, starts, torch.tensor(lengths, dtype=torch.int32), heads * head_dim)


def in_dtype(kv_cache: Tensor, dtype: torch.dtype) -> Tensor:
    """The same cache in another dtype."""
    if dtype != torch.int8:
        return convert_reference(kv_cache, dtype)
    shape = kv_cache.shape
    quantized = torch.zeros(*shape[:-1], shape[-1] + SCALE_BYTES, dtype=torch.int8)
    values, scales = views_of(quantized)
    assert scales is not None
    row_scales, rows = quantize_reference(kv_cache.flatten(0, -2))
    scales.copy_(row_scales.view(scales.shape))
    values.copy_(rows.view(values.shape))
    return quantized
