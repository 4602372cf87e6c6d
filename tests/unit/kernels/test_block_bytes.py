import pytest
import torch

from kvasir.kernels.block_bytes import block_bytes, pool_bytes, write_block_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_go_from_one_cache_to_another(dtype: torch.dtype) -> None:
    here, there = torch.randn(5, 2, 2, 3, 4, 8).to(dtype), torch.zeros(6, 2, 2, 3, 4, 8, dtype=dtype)
    payload = block_bytes(here, 3)
    assert payload.nbytes == here[3].numel() * dtype.itemsize
    write_block_bytes(there, 5, payload)
    assert torch.equal(there[5], here[3])
    assert not there[:5].any()


def test_reading_copies_nothing() -> None:
    cache = torch.zeros(2, 4)
    view = block_bytes(cache, 1)
    cache[1] = 1
    assert view.cast("f").tolist() == [1, 1, 1, 1]


def test_a_payload_in_words_is_as_good_as_one_in_bytes() -> None:
    cache = torch.zeros(2, 4)
    write_block_bytes(cache, 0, block_bytes(torch.ones(1, 4), 0).cast("f"))
    assert cache[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("num_bytes", [0, 15, 17, 32])
def test_a_payload_of_another_size_is_refused(num_bytes: int) -> None:
    cache = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="16 bytes"):
        write_block_bytes(cache, 0, memoryview(bytes(num_bytes)))
    assert not cache.any()


def test_the_pool_is_its_blocks_one_behind_the_other() -> None:
    cache = torch.randn(3, 2, 4)
    pool = pool_bytes(cache)
    assert pool.shape == (3, 32)
    cache[2] = 7
    assert pool.tolist() == [list(block_bytes(cache, block)) for block in range(3)]
