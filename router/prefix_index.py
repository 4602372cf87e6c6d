"""Which node holds which part of a prompt, as far as the nodes have told.

A guess: what a node says of its cache is a moment old, and a key is a part of a hash. A wrong one costs time alone, for
a node looks again by whole hashes.
"""

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from typing import NamedTuple

from kvasir.common.hashing import hash_chain, root_hash, routing_key

log = logging.getLogger(__name__)


class Prefix:
    """The tokens of one request, to be looked up. Hashed once, and no further than some node holds them."""

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self._token_ids = token_ids
        self._cache_salt = cache_salt
        self._chains: dict[tuple[bytes, int], _Chain] = {}  # by what the nodes' hashes depend on

    def num_leading(self, held: Set[int], kv_identity: bytes, block_size: int) -> int:
        """How many of its first blocks are held. The last token is in none of them: it is computed in any case."""
        if not held or len(self._token_ids) <= block_size:
            return 0
        chain = self._chains.get((kv_identity, block_size))
        if chain is None:
            hashes = hash_chain(root_hash(kv_identity, self._cache_salt), self._token_ids[:-1], block_size)
            chain = self._chains[kv_identity, block_size] = _Chain(map(routing_key, hashes))
        return chain.num_leading(held)


class _Chain:
    """Keys of blocks; those that nobody has looked at are not computed yet."""

    def __init__(self, rest: Iterator[int]) -> None:
        self._keys: list[int] = []
        self._rest = rest

    def num_leading(self, held: Set[int]) -> int:
        for index, key in enumerate(self._keys):
            if key not in held:
                return index
        for key in self._rest:
            self._keys.append(key)
            if key not in held:
                return len(self._keys) - 1
        return len(self._keys)


class KVEvents(NamedTuple):
    """What a node's prefix cache gained and lost: keys, dropped first and stored then."""

    sequence: int  # counts the messages of one session
    stored: Sequence[int]
    dropped: Sequence[int] = ()
    is_snapshot: bool = False  # whatever was known before does not hold


class HeldBlocks:
    """What one node holds. No more keys are kept than it has blocks; they go with it."""

    def __init__(
        self,
        kv_identity: bytes,
        block_size: int,
        max_blocks: int,
        ask_snapshot: Callable[[], None] = lambda: None,
    ) -> None:
        """`ask_snapshot` is called when something was missed; until the answer comes, nothing is known."""
        self._kv_identity = kv_identity
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._ask_snapshot = ask_snapshot
        self._keys: set[int] = set()
        self._next_sequence = 1
        self._is_lost = False

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached_tokens(self, prefix: Prefix) -> int:
        return prefix.num_leading(self._keys, self._kv_identity, self._block_size) * self._block_size

    def apply(self, events: KVEvents) -> None:
        """The node's next message."""
        has_missed = events.sequence != self._next_sequence
        self._next_sequence = events.sequence + 1
        if events.is_snapshot:
            self._keys = set()
            self._is_lost = False
        elif has_missed:
            self._lose()
            self._ask_snapshot()
        if self._is_lost:
            return
        self._keys.difference_update(events.dropped)
        self._keys.update(events.stored)
        if len(self._keys) > self._max_blocks:
            log.warning("a node says that it holds more than its %d blocks: believed no more", self._max_blocks)
            self._lose()

    def _lose(self) -> None:
        self._keys = set()
        self._is_lost = True
