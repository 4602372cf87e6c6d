"""The KV cache's blocks as a matter of counting: which are free, and how many hold each of the others."""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvasir.engine.blocks import BlockId


class BlockPool:
    """A fixed set of blocks. Each is free, or held by one or more references; never both, never neither.

    A free block keeps its content until it is handed out again, least recently freed first. `share` can therefore
    bring a free block back; `on_reuse` is told of each block whose content is about to be lost.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[BlockId], None]) -> None:
        self._free = OrderedDict.fromkeys(BlockId(i) for i in range(num_blocks))  # the next to be handed out first
        self._ref_counts = [0] * num_blocks
        self._on_reuse = on_reuse

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: BlockId) -> int:
        return self._ref_counts[block]

    def allocate(self, num_blocks: int) -> list[BlockId] | None:
        """That many blocks, each with one reference; or None, and nothing has changed."""
        if num_blocks > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
            self._on_reuse(block)
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each; a free one is held from now on, with the content that it still has."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One reference less of each. Of those that become free, the first given is handed out first."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def check_invariant(self, expected_refs: dict[BlockId, int]) -> None:
        """Each block has exactly the references that its holders know of, and is free if these are none."""
        for i, count in enumerate(self._ref_counts):
            block = BlockId(i)
            expected = expected_refs.get(block, 0)
            assert count == expected, f"block {block} has {count} references, its holders know of {expected}"
            assert (block in self._free) == (count == 0), f"block {block} with {count} references is on the wrong side"
