"""Blocks to the host and back: the same blocks, the buffers' number, and what is refused."""

import pytest
import torch

from kvasir.engine.block_transfer import BlockTransfer
from kvasir.engine.blocks import BlockId

SHAPE = (6, 2, 2, 2, 4, 8)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "fp8"])
def test_blocks_come_back(codec: str) -> None:
    cache = torch.randn(SHAPE)
    before = cache.clone()
    transfer = BlockTransfer(cache, 4, codec=codec)  # type: ignore[arg-type]
    gathered = transfer.gather(ids(4, 1))
    assert gathered is not None
    payloads = [bytes(payload) for payload in gathered.payloads()]
    transfer.release(gathered)
    assert [len(payload) for payload in payloads] == [transfer.payload_bytes] * 2
    assert transfer.scatter(ids(0, 2), [memoryview(payload) for payload in payloads])
    transfer.join()
    error = (cache[[0, 2]] - before[[4, 1]]).abs().max()
    assert error <= {"none": 0, "fp16": 2e-3, "int8": 0.02, "fp8": 0.3}[codec]
    assert torch.equal(cache[[1, 3, 4, 5]], before[[1, 3, 4, 5]])


def test_a_range_of_heads_leaves_the_others_alone() -> None:
    cache = torch.randn(SHAPE)
    before = cache.clone()
    transfer = BlockTransfer(cache, 1, heads=range(1, 2))
    gathered = transfer.gather(ids(3))
    assert gathered is not None
    assert transfer.scatter(ids(5), gathered.payloads())
    assert torch.equal(cache[5, :, :, 1], before[3, :, :, 1])
    assert torch.equal(cache[5, :, :, 0], before[5, :, :, 0])


def test_buffers_are_as_many_as_they_are() -> None:
    cache = torch.randn(SHAPE)
    transfer = BlockTransfer(cache, 2, num_buffers=1)
    gathered = transfer.gather(ids(0))
    assert gathered is not None
    assert gathered.is_ready()
    (payload,) = gathered.payloads()
    kept = bytes(payload)
    assert transfer.gather(ids(1)) is None
    assert not transfer.scatter(ids(1), [memoryview(kept)])
    assert bytes(payload) == kept, "a payload is not overwritten before it is released"
    transfer.release(gathered)
    with pytest.raises(RuntimeError, match="twice"):
        transfer.release(gathered)
    with pytest.raises(RuntimeError, match="released"):
        gathered.payloads()
    assert transfer.gather(ids(1)) is not None


def test_what_does_not_fit_is_refused() -> None:
    transfer = BlockTransfer(torch.randn(SHAPE), 2)
    for blocks in ((), (0, 1, 2)):
        with pytest.raises(ValueError, match="blocks"):
            transfer.gather(ids(*blocks))
    with pytest.raises(IndexError):
        transfer.gather(ids(6))
    with pytest.raises(ValueError, match="payloads"):
        transfer.scatter(ids(0), [memoryview(b"short")])
    with pytest.raises(ValueError, match="payloads"):
        transfer.scatter(ids(0), [])
