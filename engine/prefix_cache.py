"""Which blocks hold which content: hash -> block, and back."""

from collections.abc import Sequence

from kvasir.common.hashing import BlockHash
from kvasir.engine.blocks import BlockId


class PrefixCache:
    """A registered block is full, computed (or verified) and never written again until the pool hands it out anew.

    Registering says nothing about who holds the block: that is the pool's matter.
    """

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._stored: dict[BlockHash, None] = {}  # gained since the last `take_events`, in order
        self._dropped: dict[BlockHash, None] = {}  # lost since then

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest known prefix of `hashes`."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, block: BlockId, block_hash: BlockHash) -> None:
        """If another block has this content already, that one is kept: it may be shared by now."""
        if block_hash in self._block_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        if block_hash in self._dropped:
            del self._dropped[block_hash]
        else:
            self._stored[block_hash] = None

    def forget(self, block: BlockId) -> None:
        """The block's content is lost, or not to be trusted. Fine for one that is not registered."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._block_of[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._dropped[block_hash] = None

    def is_registered(self, block: BlockId) -> bool:
        return block in self._hash_of

    def take_events(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """(gained, lost) since the last call: the net change, so their order does not matter."""
        stored, dropped = tuple(self._stored), tuple(self._dropped)
        self._stored.clear()
        self._dropped.clear()
        return stored, dropped

    def snapshot(self) -> tuple[BlockHash, ...]:
        """All there is now."""
        return tuple(self._block_of)
