"""A model that needs no tensors, yet really writes and reads a KV cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.request import RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Chunk, PositionLogprobs, Sampled, StepPlan

VOCAB_SIZE = 1000
_MASK = 2**64 - 1


def _mix(*values: int) -> int:
    """A deterministic scramble of some integers, as 64 bits."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 29
    return state


def _kv_of(token_id: int, position: int, digest: int) -> int:
    return _mix(token_id, position, digest) >> 2


def _digest_with(digest: int, kv: int, position: int) -> int:
    return (digest + kv * (2 * position + 1)) & _MASK


def _next_token(digest: int, position: int, seed: int) -> int:
    return _mix(digest, position, seed) % VOCAB_SIZE


def fake_kv(token_ids: Sequence[int]) -> list[int]:
    """The KV of each token, computed without any cache."""
    values: list[int] = []
    digest = 0
    for position, token_id in enumerate(token_ids):
        values.append(_kv_of(token_id, position, digest))
        digest = _digest_with(digest, values[-1], position)
    return values


def fake_digest(token_ids: Sequence[int]) -> int:
    """Of all their KV."""
    digest = 0
    for position, kv in enumerate(fake_kv(token_ids)):
        digest = _digest_with(digest, kv, position)
    return digest


def fake_tokens(token_ids: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The next `num_tokens` tokens after `token_ids`, generated without any cache."""
    tokens, digest = list(token_ids), fake_digest(token_ids)
    for _ in range(num_tokens):
        tokens.append(_next_token(digest, len(tokens), seed))
        position = len(tokens) - 1
        digest = _digest_with(digest, _kv_of(tokens[-1], position, digest), position)
    return tokens[len(token_ids) :]


def fake_score(prompt: Sequence[int], position: int) -> PositionLogprobs:
    """Of the prompt's token at that position."""
    return PositionLogprobs(((prompt[position], -1.0 - position),), rank=position)


class FakeModelRunner:
    """Deterministic. A lost, misplaced, stale or missing block changes everything that follows it.

    `kv[block, offset]` is one token's "KV": a mix of the token, its position and a digest of all KV before it, which is
    read back through the block table. The next token is a mix of the digest of all KV, the position and the seed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = np.random.default_rng(7).integers(1, 2**62, (num_blocks, block_size), dtype=np.int64)
        self.plans: list[StepPlan] = []
        self.non_finite: set[RequestId] = set()  # these get NaN logits

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        self.plans.append(plan)
        sampled = {}
        for chunk in plan.chunks:
            request, drafts = chunk.request, chunk.request.draft_token_ids[: chunk.num_drafts]
            digests = self.compute_chunk(chunk)
            for one in chunk.samplers:
                tokens = _choose(digests, chunk.end - chunk.num_drafts, one.sampling, drafts)
                sampled[one.request_id] = Sampled(tokens, is_finite=request.request_id not in self.non_finite)
            if chunk.scored:
                logprobs = tuple(fake_score(request.prompt_token_ids, position + 1) for position in chunk.scored)
                mine = sampled.get(request.request_id, Sampled())
                sampled[request.request_id] = replace(mine, prompt_logprobs=logprobs)
        return sampled

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        self.kv[target] = self.kv[source]

    def compute_chunk(self, chunk: Chunk) -> list[int]:
        """The digests at the token before its drafts and at each draft; without drafts: at its last token."""
        request = chunk.request
        token_ids = (request.token_ids + request.draft_token_ids[: chunk.num_drafts])[: chunk.end]
        return self._compute(request.block_table, token_ids, chunk.start)[-1 - chunk.num_drafts :]

    def _compute(self, block_table: list[BlockId], token_ids: list[int], start: int) -> list[int]:
        """The digest after each token."""
        block_size = self.kv.shape[1]
        digest, digests = 0, []
        for position, token_id in enumerate(token_ids):
            slot = block_table[position // block_size], position % block_size
            if position >= start:
                self.kv[slot] = _kv_of(token_id, position, digest)
            digest = _digest_with(digest, int(self.kv[slot]), position)
            digests.append(digest)
        return digests


def _choose(digests: Sequence[int], position: int, sampling: SamplingParams, drafts: Sequence[int]) -> tuple[int, ...]:
    """The token at that position, and those behind it while drafts agree."""
    tokens: list[int] = []
    for digest, draft in zip(digests, (*drafts, -1), strict=True):
        tokens.append(_next_token(digest, position + len(tokens), sampling.seed))
        if tokens[-1] != draft or tokens[-1] in sampling.stop_token_ids:
            break
    return tuple(tokens)


class FakeBlockMemory:
    """The same KV as bytes: a `BlockMemory` for connectors."""

    packing = None

    def __init__(self, kv: NDArray[np.int64]) -> None:
        self._kv = kv
        self.layout = KVLayout(
            num_layers=1, num_kv_heads=1, total_kv_heads=1, head_dim=1, block_size=kv.shape[1], dtype="float32"
        )

    @property
    def pool(self) -> memoryview:
        return self._kv.view(np.uint8).reshape(len(self._kv), -1).data

    def read(self, block_id: BlockId) -> memoryview:
        return memoryview(self._kv[block_id]).cast("B")

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        if payload.nbytes != self.layout.bytes_per_block:
            raise ValueError(f"a block has {self.layout.bytes_per_block} bytes, got {payload.nbytes}")
        self._kv[block_id] = np.frombuffer(payload, dtype=np.int64)
