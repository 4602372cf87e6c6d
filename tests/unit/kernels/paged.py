"""A paged KV cache with sequences scattered over it."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
        return float(self.kv_cache.shape[-1] ** -0.5)


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
