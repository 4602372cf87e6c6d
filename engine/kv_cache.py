"""The paged KV cache of one node: a fixed set of blocks, each holding `block_size` tokens of all layers, contiguous."""

import torch
from torch import Tensor

from kvasir.common.machine import available_memory_bytes
from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.cuda_blocks import DeviceBlocks
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.block_bytes import pool_bytes
from kvasir.kernels.cpu import huge_pages
from kvasir.kernels.kv_dtypes import SCALE_BYTES, row_length

# Shapes: N blocks  L layers  K KV heads  B tokens a block  D head dim

_DEFAULT_SHARE = 0.1  # of the memory that is free, since several nodes may share a machine
_DEFAULT_MAX_BYTES = 4 << 30
KV_CACHE_DTYPES = {"fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16", "int8": "int8"}


class KVCache:
    """`data` is [N, L, 2, K, B, D]; the 2 are keys and values. What it is in int8, with scales, kernels know.

    `read` and `write` are for any thread, all else is for the engine's.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, data: Tensor | None = None) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = cache_shape(layout, num_blocks)
        self.data = _filled(shape, getattr(torch, layout.dtype), device) if data is None else data
        pool = self.pool
        self._bytes = None if pool is None else pool.cast("B")  # made once: a view costs more than a small block
        self._beside = DeviceBlocks(self.data) if self.data.is_cuda else None

    @property
    def pool(self) -> memoryview | None:
        """[N, bytes of a block], of bytes; None where the blocks do not lie in host memory."""
        return pool_bytes(self.data) if self.data.device.type == "cpu" else None

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes; on a CPU the cache's own memory, without a copy."""
        if self._beside is not None:
            return self._beside.read(block_id)
        assert self._bytes is not None
        return self._slice(self._bytes, block_id)

    def copy(self, source: BlockId, target: BlockId) -> None:
        self.join()
        self.data[target].copy_(self.data[source])
        self.mark()

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Fill the block with exactly `layout.bytes_per_block` bytes."""
        if self._beside is not None:
            self._beside.write(block_id, payload)
        else:
            assert self._bytes is not None
            self._slice(self._bytes, block_id)[:] = payload

    @property
    def packing(self) -> DeviceBlocks | None:
        """On a GPU: what packs blocks there, on their way to the host and back."""
        return self._beside

    def join(self) -> None:
        """On a GPU: what is launched from now on sees all blocks that were written."""
        if self._beside is not None:
            self._beside.join()

    def mark(self) -> None:
        """On a GPU: whoever reads or writes a block waits for what has been launched so far, and for nothing later."""
        if self._beside is not None:
            self._beside.mark()

    def wait(self) -> None:
        """On a GPU: until it has come to the last `mark`."""
        if self._beside is not None:
            self._beside.wait()

    def _slice(self, pool: memoryview, block_id: BlockId) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        size = self.layout.bytes_per_block
        return pool[block_id * size : (block_id + 1) * size]


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Not just reserved: memory that is not there is missed now and not under load."""
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype).zero_()
    return torch.zeros(shape, dtype=dtype, device=device)


def cache_shape(layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    """Of the tensor that holds so many blocks."""
    row = row_length(layout.dtype, layout.head_dim)
    return num_blocks, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, row


def kv_layout(config: ModelConfig, block_size: int, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> KVLayout:
    """dtype: the model's, and the cache's where `kv_cache_dtype` is auto."""
    name = str(dtype).removeprefix("torch.")
    return KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        total_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=name if kv_cache_dtype == "auto" else KV_CACHE_DTYPES[kv_cache_dtype],
    )


def check_kv_dtype(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
    """Raises UnsupportedModel where a model of `dtype` on `device` cannot keep its cache in the layout's dtype."""
    if layout.dtype == str(dtype).removeprefix("torch."):
        return
    if device.type != "cpu" or dtype != torch.float32:
        raise UnsupportedModel(
            f"a KV cache in {layout.dtype} is for models computed in float32 on a CPU, not in {dtype} on {device}"
        )
    if layout.dtype == "int8" and layout.block_size * layout.head_dim % SCALE_BYTES:
        raise UnsupportedModel(
            f"a KV cache in int8 needs a multiple of {SCALE_BYTES} bytes of values in a block of a head, "
            f"not {layout.block_size} tokens of {layout.head_dim}"
        )


def num_blocks_that_fit(budget_bytes: int, bytes_per_block: int) -> int:
    """ValueError if those are fewer than two."""
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < 2:
        raise ValueError(
            f"kv_cache_memory of {budget_bytes:,} bytes is too little: two blocks have {2 * bytes_per_block:,} bytes"
        )
    return num_blocks


def default_budget_bytes() -> int:
    """On a CPU, a share of what is free now."""
    return min(int(available_memory_bytes() * _DEFAULT_SHARE), _DEFAULT_MAX_BYTES)
