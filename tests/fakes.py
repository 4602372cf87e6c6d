"""A model that needs no tensors, yet really writes and reads a KV cache."""

import numpy as np

from kvasir.engine.types import BlockId, KVLayout, RequestId, Sampled, StepPlan

_MASK = 2**64 - 1


def _mix(*values: int) -> int:
    """A deterministic scramble of some integers, as 64 bits."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
    return state


class FakeModelRunner:
    """Deterministic. A lost, misplaced, stale or missing block changes everything that follows it.

    `kv[block, offset]` is one token's "KV": a mix of the token, its position and a digest of all KV before it, which is
    read back through the block table. The next token is a mix of the digest of all KV, position and seed.
    """

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 1000) -> None:
        self.kv = np.random.default_rng(7).integers(1, 2**62, (num_blocks, block_size), dtype=np.int64)
        self.vocab_size = vocab_size
        self.plans: list[StepPlan] = []
        self.non_finite: set[RequestId] = set()  # these get NaN logits

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        self.plans.append(plan)
        sampled = {}
        for chunk in plan.chunks:
            request = chunk.request
            digest = self._compute(request.block_table, request.token_ids[: chunk.end], chunk.start)
            if chunk.samples:
                token_id = _mix(digest, chunk.end, request.sampling.seed) % self.vocab_size
                is_finite = request.request_id not in self.non_finite
                sampled[request.request_id] = Sampled((token_id,), is_finite=is_finite)
        return sampled

    def _compute(self, block_table: list[BlockId], token_ids: list[int], start: int) -> int:
        block_size = self.kv.shape[1]
        digest = 0
        for position, token_id in enumerate(token_ids):
            slot = block_table[position // block_size], position % block_size
            if position >= start:
                self.kv[slot] = _mix(token_id, position, digest) >> 2
            digest = (digest + int(self.kv[slot]) * (2 * position + 1)) & _MASK
        return digest


class FakeBlockMemory:
    """The same KV as bytes: a `BlockMemory` for connectors."""

    def __init__(self, kv: np.ndarray) -> None:
        self._kv = kv
        self.layout = KVLayout(
            num_layers=1, num_kv_heads=1, total_kv_heads=1, head_dim=1, block_size=kv.shape[1], dtype="float32"
        )

    def read(self, block_id: BlockId) -> memoryview:
        return memoryview(self._kv[block_id]).cast("B")

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        if payload.nbytes != self.layout.bytes_per_block:
            raise ValueError(f"a block has {self.layout.bytes_per_block} bytes, got {payload.nbytes}")
        self._kv[block_id] = np.frombuffer(payload, dtype=np.int64)
