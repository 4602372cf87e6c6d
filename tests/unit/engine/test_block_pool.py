"""Blocks are counted exactly, and content lives until it is handed out again."""

import pytest

from kvasir.common.hashing import BlockHash
from kvasir.engine.block_pool import BlockPool
from kvasir.engine.blocks import BlockId
from kvasir.engine.prefix_cache import PrefixCache


def make_pool(num_blocks: int) -> tuple[BlockPool, list[BlockId]]:
    reused: list[BlockId] = []
    return BlockPool(num_blocks, on_reuse=reused.append), reused


def test_all_or_nothing() -> None:
    pool, _ = make_pool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1


def test_the_least_recently_freed_is_handed_out_first() -> None:
    pool, reused = make_pool(4)
    blocks = pool.allocate(4)
    assert blocks is not None
    pool.release([blocks[2], blocks[0]])
    pool.release([blocks[3]])
    reused.clear()
    assert pool.allocate(2) == [2, 0]
    assert reused == [2, 0]


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool, reused = make_pool(1)
    pool.allocate(1)
    pool.share([BlockId(0)])
    pool.release([BlockId(0)])
    assert pool.num_free == 0
    pool.release([BlockId(0)])
    assert pool.num_free == 1
    pool.share([BlockId(0)])
    assert pool.num_free == 0
    assert reused == [0], "sharing a free block keeps its content"


def test_a_release_too_many_is_loud() -> None:
    pool, _ = make_pool(1)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([BlockId(0)])


def test_the_invariant_sees_a_lost_and_a_surplus_reference() -> None:
    pool, _ = make_pool(2)
    pool.allocate(1)
    pool.check_invariant({BlockId(0): 1})
    for wrong in ({}, {BlockId(0): 2}, {BlockId(0): 1, BlockId(1): 1}):
        with pytest.raises(AssertionError):
            pool.check_invariant(wrong)


A, B, C = (BlockHash(name) for name in (b"a", b"b", b"c"))


def test_a_match_ends_at_the_first_gap() -> None:
    cache = PrefixCache()
    cache.register(BlockId(1), A)
    cache.register(BlockId(3), C)
    assert cache.match([A, B, C]) == [1]
    cache.register(BlockId(2), B)
    assert cache.match([A, B, C]) == [1, 2, 3]


def test_the_first_block_of_a_content_is_kept() -> None:
    """Two requests may compute the same block side by side; the one that is shared already must stay."""
    cache = PrefixCache()
    cache.register(BlockId(1), A)
    cache.register(BlockId(2), A)
    cache.forget(BlockId(2))
    assert cache.match([A]) == [1]
    assert not cache.is_registered(BlockId(2))


def test_events_are_the_net_change() -> None:
    cache = PrefixCache()
    cache.register(BlockId(1), A)
    cache.register(BlockId(2), B)
    assert cache.take_events() == ((A, B), ())
    cache.forget(BlockId(1))  # lost, and stored again in another block: nothing has changed for others
    cache.register(BlockId(3), A)
    cache.register(BlockId(4), C)  # stored, and lost at once
    cache.forget(BlockId(4))
    cache.forget(BlockId(2))
    assert cache.take_events() == ((), (B,))
    assert cache.take_events() == ((), ())
    assert cache.snapshot() == (A,)
