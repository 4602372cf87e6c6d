"""The blocks of requests. Nothing else changes a request's `block_table` or `num_computed_tokens`.

    tokens       0         16         32         48        57
    block_table  | cached 0 | own 1    | own 2    | own 3 |
                 |<------ computed --->|<-- uncomputed -->|

A registered block is full and below the computed tokens, so it is never written; all others have one owner.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.block_pool import BlockPool
from kvasir.engine.blocks import BlockId, num_blocks_for
from kvasir.engine.limits import Limits
from kvasir.engine.preemption import Loss
from kvasir.engine.prefix_cache import PrefixCache
from kvasir.engine.request import Request
from kvasir.engine.step import ComputedBlocks
from kvasir.engine.swap_space import Saved, SwapSpace


class BlockTables:
    def __init__(self, limits: Limits, kv_identity: bytes) -> None:
        self._block_size = limits.block_size
        self._caches_prefixes = limits.enable_prefix_caching
        self._kv_identity = kv_identity
        self._reported: Counter[BlockId] = Counter()  # references given away with ComputedBlocks
        self.copy_block: Callable[[BlockId, BlockId], None] = lambda source, target: None  # no contents: a simulation
        self.cache = PrefixCache()
        self.swap = SwapSpace()  # of no places
        self.pool = BlockPool(limits.num_blocks, on_reuse=self.cache.forget)

    def begin(self, request: Request, num_spare_blocks: int) -> bool:
        """Put cached blocks at the front, if there is room for all of the request's tokens (and some to spare).

        At least one token stays uncomputed: its logits give the next token. False: no room, nothing has changed.
        """
        cached = self._find_cached(request)
        num_needed = num_blocks_for(request.num_tokens, self._block_size) - len(cached)
        num_available = self.pool.num_free - sum(self.pool.ref_count(block) == 0 for block in cached)
        if num_needed + num_spare_blocks > num_available:
            return False
        self.pool.share(cached)
        request.block_table = cached
        request.num_computed_tokens = len(cached) * self._block_size
        if not request.hand_off:
            request.num_reported_blocks = max(request.num_reported_blocks, len(cached))
        return True

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Let the block table cover `num_tokens` tokens. False: no room, nothing has changed."""
        missing = num_blocks_for(num_tokens, self._block_size) - len(request.block_table)
        blocks = self.pool.allocate(max(missing, 0))
        if blocks is None:
            return False
        request.block_table.extend(blocks)
        return True

    def trim(self, request: Request) -> bool:
        """Take back what was reserved beyond its tokens. False: nothing was."""
        end = num_blocks_for(request.num_tokens, self._block_size)
        beyond = request.block_table[end:]
        del request.block_table[end:]
        self.pool.release(reversed(beyond))
        return bool(beyond)

    def fork(self, leader: Request, fork: Request) -> bool:
        """Put the leader's prompt at the front: full blocks are shared, what is in a partial one is copied.

            leader  | full 0 | full 1 | partial 2 | ...
            fork    | full 0 | full 1 | copy of 2 |         at least one token stays uncomputed, as in `begin`

        False: no room, nothing has changed.
        """
        num_tokens = min(len(leader.prompt_token_ids), leader.num_computed_tokens, fork.num_tokens - 1)
        num_full = num_tokens // self._block_size
        copies = self.pool.allocate(1 if num_tokens % self._block_size else 0)
        if copies is None:
            return False
        shared = leader.block_table[:num_full]
        self.pool.share(shared)
        for target in copies:
            self.copy_block(leader.block_table[num_full], target)
        fork.block_table = [*shared, *copies]
        fork.block_hashes = leader.block_hashes[:num_full]
        fork.inexact_from = leader.inexact_from
        fork.num_computed_tokens = num_tokens
        fork.num_reported_blocks = num_full
        return True

    def advance(self, request: Request, num_computed_tokens: int) -> None:
        """So many tokens are computed now, then those of landed blocks that follow without a gap."""
        self._set_computed(request, num_computed_tokens)
        landed_end = self._end_of_landed(request)
        if landed_end > num_computed_tokens:
            # The next token's logits come from the last token: if that one has landed, it is computed once more,
            # into a block that nobody else holds yet.
            self._set_computed(request, min(landed_end, request.num_tokens - 1))

    def release(self, request: Request) -> None:
        """Tail first: blocks are handed out in the order freed, so a shared prefix lives longest."""
        self.pool.release(reversed(request.block_table))
        request.block_table = []
        request.num_computed_tokens = 0
        request.loaded_blocks.clear()
        request.inexact_from = None  # computed again from scratch, it is exact
        if request.saved is not None:
            self.swap.release(request.saved.places.values())
            request.saved = None

    def loss_of(self, request: Request) -> Loss:
        """What it would give up by being preempted."""
        owned = [self.pool.ref_count(block) == 1 for block in request.block_table]
        return Loss(
            num_tokens=request.num_computed_tokens,
            num_kept_tokens=min(self._num_kept(request) * self._block_size, request.num_computed_tokens),
            num_stored_tokens=min(request.num_stored_tokens, request.num_computed_tokens),
            num_own_blocks=len(self._to_save(request)),
            num_freed_blocks=sum(owned),
            block_size=self._block_size,
        )

    def save(self, request: Request) -> Saved | None:
        """Copy to the host what would be lost with its blocks. None: no room there."""
        indices = self._to_save(request)
        if len(indices) > self.swap.num_free:
            return None
        places = self.swap.save([request.block_table[i] for i in indices])
        end = request.landed_end if request.loaded_blocks else request.num_computed_tokens
        return Saved(dict(zip(indices, places, strict=True)), end, request.inexact_from)

    def restore(self, request: Request) -> None:
        """Bring back what was saved, behind what `begin` has found; its block table covers all of it."""
        saved, request.saved = request.saved, None
        assert saved is not None
        first = self._num_full(request)
        wanted = [i for i in saved.places if i >= first]
        self.swap.load([saved.places[i] for i in wanted], [request.block_table[i] for i in wanted])
        self.swap.release(saved.places.values())
        request.loaded_blocks.update(wanted)
        request.landed_end = saved.end
        request.inexact_from = saved.inexact_from
        self.advance(request, request.num_computed_tokens)

    def distrust(self, request: Request) -> None:
        """Its blocks may hold what no other request should find."""
        for block in request.block_table:
            self.cache.forget(block)

    def report(self, request: Request) -> ComputedBlocks | None:
        """The blocks that became final since the last report, each with a reference for whoever reads it."""
        block_size, num_tokens = self._block_size, request.num_tokens_at_arrival
        if not request.hand_off:
            num_tokens = request.num_computed_tokens
        is_last = request.hand_off and request.num_computed_tokens >= num_tokens
        first, end = request.num_reported_blocks, self._num_full(request)
        if is_last:
            end = num_blocks_for(num_tokens, block_size)
        if end <= first:
            return None
        self._hash_known_tokens(request)
        blocks = tuple(request.block_table[first:end])
        self.pool.share(blocks)
        self._reported.update(blocks)
        request.num_reported_blocks = end
        counts = tuple(min(block_size, num_tokens - i * block_size) for i in range(first, end))
        full = request.block_hashes[first : request.num_exact(num_tokens // block_size)]
        hashes = (*full[: end - first], *[None] * (end - first - len(full)))
        return ComputedBlocks(request.request_id, first, blocks, hashes, counts, is_last)

    def release_reported(self, blocks: Sequence[BlockId]) -> None:
        for block in reversed(blocks):
            if not self._reported[block]:
                raise RuntimeError(f"block {block} was given back more often than it was reported")
            self._reported[block] -= 1
            self.pool.release([block])

    def check_invariant(self, requests: Collection[Request]) -> None:
        expected: Counter[BlockId] = Counter(self._reported)
        for request in requests:
            expected.update(request.block_table)
        self.pool.check_invariant(expected)
        saved = [request.saved for request in requests if request.saved is not None]
        self.swap.check_invariant([place for one in saved for place in one.places.values()])

    def _num_full(self, request: Request) -> int:
        return request.num_computed_tokens // self._block_size

    def _num_kept(self, request: Request) -> int:
        """Blocks at the front that others hold too, so that the prefix cache is likely to have them later."""
        if not self._caches_prefixes or request.is_scoring:
            return 0
        table = request.block_table
        alone = (i for i, one in enumerate(table) if self.pool.ref_count(one) == 1 or not self.cache.is_registered(one))
        return next(alone, len(table))

    def _to_save(self, request: Request) -> list[int]:
        """Indices of blocks with content, in order. Only the last of them may be partial."""
        computed = request.num_computed_tokens
        end = computed // self._block_size if request.loaded_blocks else num_blocks_for(computed, self._block_size)
        return [*range(self._num_kept(request), end), *sorted(request.loaded_blocks)]

    def _find_cached(self, request: Request) -> list[BlockId]:
        if self._caches_prefixes or request.hand_off or "blocks" in request.awaits:
            self._hash_known_tokens(request)  # also the names of blocks that travel
        if not self._caches_prefixes or request.is_scoring:  # what is found is not computed, and gives no logits
            return []
        most = (request.num_tokens - 1) // self._block_size
        return self.cache.match(request.block_hashes[:most])

    def _hash_known_tokens(self, request: Request) -> None:
        if len(request.block_hashes) < request.num_tokens // self._block_size:
            root = root_hash(self._kv_identity, request.cache_salt)
            request.block_hashes = block_hashes(root, request.token_ids, self._block_size, request.block_hashes)

    def _set_computed(self, request: Request, num_computed_tokens: int) -> None:
        first = self._num_full(request)
        request.num_computed_tokens = num_computed_tokens
        if self._caches_prefixes and self._num_full(request) > first:
            self._register(request, range(first, request.num_exact(self._num_full(request))))

    def _register(self, request: Request, indices: range) -> None:
        self._hash_known_tokens(request)
        for i in indices:
            self.cache.register(request.block_table[i], request.block_hashes[i])

    def _end_of_landed(self, request: Request) -> int:
        """Where the landed blocks end that follow the computed tokens without a gap.

        The last landed block may be partial: it ends with the tokens that were asked for, or saved.
        """
        end = request.num_computed_tokens
        while end % self._block_size == 0 and end // self._block_size in request.loaded_blocks:
            request.loaded_blocks.remove(end // self._block_size)
            end = min(end + self._block_size, request.landed_end)
        return end
