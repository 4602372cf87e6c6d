"""The bytes of a swap space."""

import numpy as np

from kvasir.engine.blocks import BlockId
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.swap_space import HostBlock


class HostBlocks:
    """Memory is taken from the system as it is first used, and kept."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self._kv_cache = kv_cache
        self._data = np.empty((num_blocks, kv_cache.layout.bytes_per_block), np.uint8)

    def save(self, block: BlockId, place: HostBlock) -> None:
        self._data[place] = np.frombuffer(self._kv_cache.read(block), np.uint8)

    def load(self, place: HostBlock, block: BlockId) -> None:
        self._kv_cache.write(block, self._data[place].data)
