"""Runs a step's plan: one forward pass over all its tokens, then one token for each request that is due one."""

import torch

from kvasir.engine.batch import build_batch, decodes_first
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.models.rope import rope_table
from kvasir.engine.sampler import sample
from kvasir.engine.types import BlockId, Chunk, Request, RequestId, Sampled, StepPlan


class ModelRunner:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(self, model: LlamaForCausalLM, kv_cache: KVCache, max_model_len: int) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.data.device
        cos, sin = rope_table(model.config.rope, model.config.head_dim, max_model_len)
        self._rope_table = cos.to(self._device), sin.to(self._device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        chunks = decodes_first(plan)
        batch = build_batch(chunks, self._kv_cache.layout.block_size, self._rope_table, self._device)
        hidden = self._model.forward(batch, self._kv_cache.data)
        rows = [row for row, chunk in enumerate(chunks) if chunk.samples]
        if not rows:
            return {}
        logits = self._model.logits(hidden[batch.last_tokens[rows]])
        requests = [chunks[row].request for row in rows]
        sampled = sample(logits, requests)
        return {request.request_id: one for request, one in zip(requests, sampled, strict=True)}

    def warm_up(self) -> None:
        """Compile and choose the kernels before the first request waits for it. Writes into the first block."""
        block_size = self._kv_cache.layout.block_size
        request = Request(
            request_id=RequestId("warm-up"), prompt_token_ids=[0] * min(block_size, 4), block_table=[BlockId(0)]
        )
        last = request.num_tokens - 1
        for chunk in (Chunk(request, 0, request.num_tokens), Chunk(request, last, 1)):
            self.execute(StepPlan((chunk,)))
