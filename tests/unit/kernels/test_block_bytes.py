import pytest
import torch

from kvasir.kernels.block_bytes import joined_block_bytes, pool_bytes, write_joined_block_bytes


def test_the_pool_is_its_blocks_one_behind_the_other() -> None:
    cache = torch.randn(3, 2, 4)
    pool = pool_bytes(cache)
    assert pool.shape == (3, 32)
    cache[2] = 7
    assert [bytes(row) for row in pool.tolist()] == [block.numpy().tobytes() for block in cache]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_with_heads_of_their_own_give_and_take_whole_blocks(dtype: torch.dtype, num_parts: int) -> None:
    whole = torch.randn(5, 3, 2, 4, 8, 16).to(dtype)
    parts = [part.contiguous() for part in whole.chunk(num_parts, dim=3)]
    payload = joined_block_bytes(parts, 3)
    assert bytes(payload) == bytes(pool_bytes(whole).tolist()[3])
    others = [torch.zeros_like(part) for part in parts]
    write_joined_block_bytes(others, 1, payload.cast("f"))
    assert torch.equal(torch.cat(others, dim=3)[1], whole[3])
    assert not torch.cat(others, dim=3)[[0, 2, 3, 4]].any()


@pytest.mark.parametrize("num_bytes", [0, 511, 513, 1024])
def test_a_payload_of_another_size_is_refused(num_bytes: int) -> None:
    parts = [torch.zeros(2, 1, 2, 2, 4, 4) for _ in range(2)]
    with pytest.raises(ValueError, match="512 bytes"):
        write_joined_block_bytes(parts, 0, memoryview(bytes(num_bytes)))
    assert not any(part.any() for part in parts)
