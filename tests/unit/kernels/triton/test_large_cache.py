"""A cache of more than 2^31 elements: 4.3 GB of addresses, of which the interpreter touches a few pages."""

import pytest
import torch
from torch import Tensor

from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.prefill_attention import prefill_attention
from kvasir.kernels.write_kv import write_kv
from tests.unit.kernels.triton.tolerances import assert_near

BLOCK, HEAD_DIM = 16, 64
NUM_BLOCKS = 2**31 // (2 * BLOCK * HEAD_DIM) + 2  # one layer, one KV head: the last block begins at 2^31 + 2048
FAR = NUM_BLOCKS - 1


@pytest.fixture
def kv_cache(device: str) -> Tensor:
    cache = torch.empty(NUM_BLOCKS, 1, 2, 1, BLOCK, HEAD_DIM, dtype=torch.float16, device=device)
    assert cache.numel() > 2**31
    cache[[0, 1, FAR]] = 0
    return cache


def test_writes_to_the_last_block(kv_cache: Tensor, device: str) -> None:
    qkv = torch.randn(2, 3 * HEAD_DIM, device=device, dtype=torch.float16)
    slots = torch.tensor([FAR * BLOCK + 5, 3], device=device)
    write_kv(qkv, None, None, slots, kv_cache, 0)
    assert torch.equal(kv_cache[FAR, 0, :, 0, 5].flatten(), qkv[0, HEAD_DIM:])
    assert torch.equal(kv_cache[0, 0, :, 0, 3].flatten(), qkv[1, HEAD_DIM:])


@pytest.mark.parametrize("operation", ["prefill", "decode"])
def test_reads_the_last_block(operation: str, kv_cache: Tensor, device: str) -> None:
    kv_cache[[0, FAR]] = torch.randn(2, 1, 2, 1, BLOCK, HEAD_DIM, device=device, dtype=torch.float16)
    tables = torch.tensor([[FAR, 0]], dtype=torch.int32, device=device)
    query = torch.randn(1, HEAD_DIM, device=device, dtype=torch.float16)
    lengths = torch.tensor([BLOCK + 4], dtype=torch.int32, device=device)
    out = torch.full_like(query, torch.nan)
    if operation == "prefill":
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        prefill_attention(query, kv_cache, 0, tables, starts, lengths, out, scale=0.125)
    else:
        decode_attention(query, kv_cache, 0, tables, lengths, out, scale=0.125)
    keys, values = torch.cat((kv_cache[FAR, 0, :, 0], kv_cache[0, 0, :, 0, :4]), dim=1).double()
    assert_near(out, (query.double() @ keys.T * 0.125).softmax(-1) @ values)
