"""A model's forward pass over a KV cache with no engine around it: in float32, on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs, build_batch
from kvasir.engine.blocks import BlockId, num_blocks_for
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk
from kvasir.kernels.linear import Quantization

# Shapes: T tokens of all sequences  R rows that need logits  C hidden size  V vocabulary

BLOCK_SIZE = 16
_CPU = torch.device("cpu")


class BareModel:
    def __init__(self, directory: Path, quantization: Quantization = "none") -> None:
        config = read_model_config(directory)
        self.max_position = config.max_position
        self.model = load_model(directory, replace(config, quantization=quantization), torch.float32, _CPU)
        self._ropes = rope_tables(config.ropes, config.head_dim, config.max_position)

    def new_cache(self, num_blocks: int, dtype: str = "auto") -> KVCache:
        return KVCache(kv_layout(self.model.config, BLOCK_SIZE, torch.float32, dtype), num_blocks, _CPU)

    def batch(self, start: int, sequences: Sequence[Sequence[int]]) -> BatchInputs:
        """The tokens behind `start` of each sequence."""
        return build_batch(chunks_behind(start, sequences), BLOCK_SIZE, self._ropes, _CPU)

    @torch.inference_mode()
    def hidden(self, batch: BatchInputs, cache: KVCache) -> Tensor:
        """-> [T, C]"""
        return self.model.forward(batch, cache.data)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] -> [R, V]"""
        return self.model.logits(hidden)


def chunks_behind(start: int, sequences: Sequence[Sequence[int]]) -> list[Chunk]:
    """The tokens behind `start` of each sequence. Each has blocks of its own, as many as the longest needs."""
    num_blocks = num_blocks_for(max(map(len, sequences)), BLOCK_SIZE)
    chunks = []
    for number, token_ids in enumerate(sequences):
        table = [BlockId(number * num_blocks + i) for i in range(num_blocks)]
        request = Request(request_id=RequestId(str(number)), prompt_token_ids=list(token_ids), block_table=table)
        chunks.append(Chunk(request, start, len(token_ids) - start))
    return chunks
