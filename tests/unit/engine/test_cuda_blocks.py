"""Blocks read and written by many threads at once, through fewer buffers."""

import threading

import pytest
import torch

from kvasir.engine.blocks import BlockId
from kvasir.engine.cuda_blocks import DeviceBlocks
from kvasir.kernels.pack_blocks import payload_bytes

NUM_THREADS, NUM_BLOCKS_EACH, NUM_ROUNDS = 6, 3, 40


def test_many_threads_through_two_buffers() -> None:
    cache = torch.zeros(NUM_THREADS * NUM_BLOCKS_EACH, 2, 2, 2, 4, 8)
    blocks = DeviceBlocks(cache, num_buffers=2)
    wrong: list[str] = []

    def work(thread: int) -> None:
        generator = torch.Generator().manual_seed(thread)
        for turn in range(NUM_ROUNDS):
            block = BlockId(thread * NUM_BLOCKS_EACH + turn % NUM_BLOCKS_EACH)
            content = torch.rand(cache[0].shape, generator=generator)
            payload = bytes(content.view(torch.uint8).flatten().tolist())
            blocks.write(block, memoryview(payload))
            kept = blocks.read(block)
            blocks.write(block, memoryview(bytes(len(payload))))
            if bytes(kept) != payload:
                wrong.append(f"thread {thread}, turn {turn}")

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert not cache.any()


@pytest.mark.parametrize("codec", ["fp16", "int8", "fp8"])
def test_packed_blocks_come_back(codec: str) -> None:
    cache = torch.randn(3, 2, 2, 2, 4, 8)
    before, blocks = cache.clone(), DeviceBlocks(cache)
    packed = bytearray(payload_bytes(cache, codec))  # type: ignore[arg-type]
    blocks.read_packed(BlockId(0), codec, memoryview(packed))
    blocks.write_packed(BlockId(2), codec, memoryview(packed))
    assert 0 < (cache[2] - before[0]).abs().max() < 0.2
    assert torch.equal(cache[:2], before[:2])
    with pytest.raises(ValueError, match="unknown codec"):
        blocks.write_packed(BlockId(2), "zip", memoryview(packed))


def test_what_is_refused_leaves_the_buffers() -> None:
    cache = torch.rand(2, 1, 2, 1, 4, 8)
    blocks = DeviceBlocks(cache, num_buffers=1)
    for _ in range(3):
        with pytest.raises(IndexError):
            blocks.read(BlockId(2))
        with pytest.raises(ValueError, match="payloads"):
            blocks.write(BlockId(0), memoryview(b"short"))
    payload = blocks.read(BlockId(0))
    blocks.write(BlockId(1), payload)
    blocks.join()
    assert torch.equal(cache[0], cache[1])
