"""The logits of one sequence, computed in steps that are cut in any way, beside others."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvasir.engine.batch import build_batch, decodes_first
from kvasir.engine.blocks import BlockId
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk, StepPlan
from kvasir.kernels.linear import Quantization
from tests.unit.engine.forward import CPU

BLOCK_SIZE = 16


class Cuts:
    """A model and its KV cache. The sequence and each of the others have blocks of their own, which lie backwards."""

    def __init__(self, directory: Path, how: Quantization, tokens: list[int], num_others: int,
                 kv_dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        config = replace(read_model_config(directory), quantization=how)
        self._model = load_model(directory, config, torch.float32, CPU)
        self._tokens, self._num_blocks = tokens, -(-len(tokens) // BLOCK_SIZE)
        self._kv_cache = KVCache(kv_layout(config, BLOCK_SIZE, kv_dtype), (2 + num_others) * self._num_blocks, CPU)
        self._ropes = rope_tables(config.ropes, config.head_dim, len(tokens))
        self._others = [self._sequence(2 + i, tokens[i + 1 :] + tokens[: i + 1]) for i in range(num_others)]

    def logits(self, sizes: Sequence[int], *, beside: int = 0, start: int = 0, spare: bool = False) -> Tensor:
        """[tokens from `start` on, V], in chunks of `sizes`, the last one repeated. What is before is in the cache.

        beside: so many others, of all lengths, have a chunk in each step. spare: in other blocks
        """
        own, found, at, step = self._sequence(1 if spare else 0, self._tokens), [], start, 0
        while at < len(self._tokens):
            size = min(sizes[min(step, len(sizes) - 1)], len(self._tokens) - at)
            chunks = [self._other(i, step) for i in range(beside)] + [Chunk(own, at, size)]
            ordered = decodes_first(StepPlan(tuple(chunks)))
            rows = [(chunk is chunks[-1]) for chunk in ordered for _ in range(chunk.num_tokens)]
            hidden = self._model.forward(build_batch(ordered, BLOCK_SIZE, self._ropes, CPU), self._kv_cache.data)
            found.append(self._model.logits(hidden)[torch.tensor(rows)])
            at, step = at + size, step + 1
        return torch.cat(found)

    def move_to_spare(self, num_blocks: int) -> None:
        """As after a swap: what was computed lies elsewhere, and where it was is garbage."""
        own, spare = (self._sequence(which, self._tokens).block_table for which in (0, 1))
        for source, target in zip(own[:num_blocks], spare[:num_blocks], strict=True):
            self._kv_cache.copy(source, target)
        for block in own:
            self._kv_cache.data[block].view(torch.uint8).fill_(0xFF)

    def _sequence(self, which: int, tokens: list[int]) -> Request:
        blocks = range((which + 1) * self._num_blocks - 1, which * self._num_blocks - 1, -1)
        return Request(
            request_id=RequestId(str(which)), prompt_token_ids=tokens, block_table=[BlockId(block) for block in blocks]
        )

    def _other(self, i: int, step: int) -> Chunk:
        """Computes its first tokens; then goes on with one a step, or with as many again from the beginning."""
        first = 5 + 23 * i
        if step == 0 or i % 2:
            return Chunk(self._others[i], 0, first)
        return Chunk(self._others[i], first + (step - 1) % (len(self._tokens) - first), 1)
