"""Packing out of, and into, a cache of more than 2^31 elements, of which the interpreter touches a few pages."""

import pytest
import torch

from kvasir.kernels.pack_blocks import Codec, pack_blocks, payload_bytes, unpack_blocks

BLOCK, HEAD_DIM = 16, 64
NUM_BLOCKS = 2**31 // (2 * BLOCK * HEAD_DIM) + 2  # one layer, one KV head: the last block begins at 2^31 + 2048
FAR = NUM_BLOCKS - 1


@pytest.mark.parametrize("codec", ["none", "fp8"])
def test_the_last_block_comes_and_goes(codec: Codec, device: str) -> None:
    cache = torch.empty(NUM_BLOCKS, 1, 2, 1, BLOCK, HEAD_DIM, dtype=torch.float16, device=device)
    assert cache.numel() > 2**31
    cache[[0, 1, FAR]] = 0
    cache[FAR] = torch.arange(2 * BLOCK, device=device).view(1, 2, 1, BLOCK, 1)  # exact in each codec
    staging = torch.zeros(1, payload_bytes(cache, codec), dtype=torch.uint8, device=device)
    pack_blocks(cache, torch.tensor([FAR], device=device), staging, codec=codec)
    unpack_blocks(staging, torch.tensor([1], device=device), cache, codec=codec)
    assert torch.equal(cache[1], cache[FAR])
    cache[FAR] = 0
    unpack_blocks(staging, torch.tensor([FAR], device=device), cache, codec=codec)
    assert torch.equal(cache[FAR], cache[1])
    assert not cache[0].any()
