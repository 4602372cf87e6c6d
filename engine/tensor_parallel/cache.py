"""The KV cache of several ranks, each of which holds its own heads, as one.

    rank 0   [N, L, 2, K / size, B, D]      a block, as all others know it: [L, 2, K, B, D], heads in order
    rank 1   [N, L, 2, K / size, B, D]

What travels and what is stored has all heads, whatever the number of ranks: so nodes of different sizes pair, and
share what is in a store. The parts are files in memory, which rank 0 maps too.
"""

import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.kv_cache import KVCache, cache_shape
from kvasir.kernels.block_bytes import joined_block_bytes, write_joined_block_bytes

_IN_MEMORY = Path("/dev/shm")


class ShardedKVCache(KVCache):
    """`data` is the part of this rank, the first; blocks are read, written and copied whole."""

    def __init__(self, layout: KVLayout, num_blocks: int, size: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvasir-kv-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
        self._parts: list[Tensor] = []
        try:
            for rank in range(size):
                part = map_part(self.path_of(rank), layout, num_blocks, size)
                self._parts.append(part.zero_())  # memory that is not there is missed now and not under load
        except BaseException:
            self.forget_files()
            raise
        super().__init__(layout, num_blocks, torch.device("cpu"), self._parts[0])

    def path_of(self, rank: int) -> Path:
        return self._directory / str(rank)

    def forget_files(self) -> None:
        """Once every rank has mapped its part; the memory lives as long as it is mapped."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def pool(self) -> memoryview | None:
        """A block's bytes do not lie in one piece."""
        return None

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, put together."""
        return joined_block_bytes(self._parts, block_id)

    def copy(self, source: BlockId, target: BlockId) -> None:
        for part in self._parts:
            part[target].copy_(part[source])

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Give each rank its heads of exactly `layout.bytes_per_block` bytes."""
        write_joined_block_bytes(self._parts, block_id, payload)


def map_part(path: Path, layout: KVLayout, num_blocks: int, size: int) -> Tensor:
    """One rank's part of a cache of `layout`, shared with whoever maps the same file: [N, L, 2, K / size, B, D]"""
    part = replace(layout, num_kv_heads=layout.num_kv_heads // size)
    shape = cache_shape(part, num_blocks)
    dtype: torch.dtype = getattr(torch, part.dtype)
    return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
