"""One block of the KV cache: its name on this node, and what its bytes are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from kvasir.kernels.kv_dtypes import row_bytes

BlockId = NewType("BlockId", int)  # index into ONE node's KV cache; meaningless on any other node


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What the bytes of one block are; both sides of a transfer must agree on it, but for the dtype."""

    num_layers: int
    num_kv_heads: int  # held here
    total_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # "float32", "bfloat16", "float16", "int8"
    first_kv_head: int = 0

    @property
    def bytes_per_block(self) -> int:
        num_rows = 2 * self.num_layers * self.num_kv_heads * self.block_size
        return num_rows * row_bytes(self.dtype, self.head_dim)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """5 tokens, block_size 4 -> 2"""
    return -(-num_tokens // block_size)


def slot_mapping(block_table: Sequence[BlockId], positions: range, block_size: int) -> list[int]:
    """block_table [5, 2], block_size 4, positions 3..5  ->  [23, 8, 9]"""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]
