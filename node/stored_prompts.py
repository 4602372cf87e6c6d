"""What a store has of prompts that this node would have to compute itself."""

from collections.abc import Callable, Sequence

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.request import Request
from kvasir.engine.step import Admitted
from kvasir.kv_connector.base import BlockKey, KVBlock
from kvasir.kv_connector.receiver import KVReceiver


class StoredPrompts:
    """`compute_s`: what computing so many tokens here would take. Where fetching takes longer, it is as if the store
    had nothing."""

    def __init__(
        self, receiver: KVReceiver, kv_identity: bytes, block_size: int, compute_s: Callable[[int], float | None]
    ) -> None:
        self._receiver = receiver
        self._kv_identity = kv_identity
        self._block_size = block_size
        self._compute_s = compute_s

    def keys(self, request: Request, num_tokens: int) -> list[BlockKey]:
        """Of the full blocks of its first `num_tokens` tokens, but for the last of these, which is computed here in any
        case. Where the prompt is scored, all of them are, and there are no keys."""
        if request.is_scoring:
            return []
        token_ids = request.token_ids[: num_tokens - 1]
        root = root_hash(self._kv_identity, request.cache_salt)
        return [BlockKey(block_hash) for block_hash in block_hashes(root, token_ids, self._block_size)]

    async def num_leading(self, keys: Sequence[BlockKey], stored_as: str = "") -> int:
        """How many of them to fetch. `stored_as`: of the ticket by which they will be, if there is one."""
        num_stored = await self._receiver.lookup(keys, stored_as) if keys else 0
        compute_s = self._compute_s(num_stored * self._block_size)
        return num_stored if num_stored and self._receiver.is_worth_fetching(num_stored, compute_s) else 0

    def wanted(self, admitted: Admitted, keys: Sequence[BlockKey]) -> list[KVBlock]:
        """Those of the leading blocks, of which these are the keys, that the engine lacks."""
        return [
            KVBlock(index, keys[index], admitted.block_table[index], self._block_size)
            for index in admitted.missing
            if index < len(keys)
        ]
