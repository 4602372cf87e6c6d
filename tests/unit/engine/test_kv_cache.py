from dataclasses import replace

import pytest
import torch

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.kv_cache import KVCache, default_budget_bytes, num_blocks_that_fit
from kvasir.engine.speculation.build import bytes_per_block
from kvasir.kernels.kv_rows import read_rows
from kvasir.kernels.write_kv import write_kv

CPU = torch.device("cpu")
LAYOUT = KVLayout(num_layers=2, num_kv_heads=3, total_kv_heads=3, head_dim=8, block_size=4, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_is_one_piece_of_bytes(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    cache = KVCache(layout, 5, CPU)
    assert cache.data.shape == (5, 2, 2, 3, 4, 8)
    cache.data[3].normal_()
    payload = cache.read(BlockId(3))
    assert payload.nbytes == layout.bytes_per_block
    cache.write(BlockId(1), payload)
    assert torch.equal(cache.data[1], cache.data[3])
    assert not cache.data[[0, 2, 4]].any()


def test_a_block_in_int8_has_its_scales_in_it() -> None:
    layout = replace(LAYOUT, dtype="int8")
    cache = KVCache(layout, 3, CPU)
    assert layout.bytes_per_block == 2 * 2 * 3 * 4 * (8 + 4)
    assert num_blocks_that_fit(10 * LAYOUT.bytes_per_block, layout.bytes_per_block) == 26
    qkv = torch.randn(1, 9 * 8)
    write_kv(qkv, None, None, torch.tensor([4]), cache.data, 1)
    cache.write(BlockId(2), cache.read(BlockId(1)))
    cache.copy(BlockId(1), BlockId(0))
    rows = read_rows(cache.data, torch.float32)
    for block in range(3):
        torch.testing.assert_close(rows[block, 1, :, :, 0].flatten(), qkv[0, 24:], rtol=0, atol=0.02)
        assert not rows[block, 0].any()


def test_budget() -> None:
    one_block = bytes_per_block(LAYOUT, None)
    assert num_blocks_that_fit(10 * one_block + 1, one_block) == 10
    assert num_blocks_that_fit(2 * one_block, one_block) == 2
    with pytest.raises(ValueError, match=f"is too little: two blocks have {2 * one_block:,} bytes"):
        num_blocks_that_fit(2 * one_block - 1, one_block)
    with pytest.raises(ValueError, match="kv_cache_memory of 1,000 bytes is too little"):
        num_blocks_that_fit(1000, one_block)


def test_the_default_budget_leaves_most_of_the_memory_to_others() -> None:
    assert 0 < default_budget_bytes() <= 4 << 30
