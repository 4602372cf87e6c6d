"""The model over one KV cache: a step's hidden states, launched kernel by kernel or replayed as a graph."""

from typing import Protocol

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs, HostBatch
from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.cuda_graphs import Capture, DecodeGraphs, captured_sizes
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.rope import rope_tables

# Shapes: T tokens in this step  C hidden size  R rows that are sampled from


class Model(Protocol):
    config: ModelConfig

    def forward(self, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """-> hidden [T, C]; writes the step's keys and values into kv_cache [N, L, 2, K, B, D]"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C], the rows that need logits -> [R, V] float32"""
        ...


class ForwardPass:
    """Not thread-safe: one thread owns it. Each rank of a model that is cut has one, and all are given the same."""

    def __init__(self, model: Model, kv_cache: Tensor, block_size: int, max_model_len: int) -> None:
        """kv_cache [N, L, 2, K, B, D], on the model's device"""
        self._model = model
        self._kv_cache = kv_cache
        self._device = kv_cache.device
        tables = rope_tables(model.config.ropes, model.config.head_dim, max_model_len)
        self._rope_tables = [(cos.to(self._device), sin.to(self._device)) for cos, sin in tables]
        self._max_blocks = num_blocks_for(max_model_len, block_size)
        self._graphs: DecodeGraphs | None = None

    def __call__(self, host: HostBatch) -> tuple[Tensor, Tensor]:
        """-> hidden [T, C], sampled_tokens [R], which say where in it; replayed, there is padding too"""
        shape = None if self._graphs is None else self._graphs.shape_for(host)
        if self._graphs is None or shape is None:
            batch = host.on_device(self._rope_tables, self._device)
            return self._model.forward(batch, self._kv_cache), batch.sampled_tokens
        batch = host.padded(*shape).on_device(self._rope_tables, self._device)
        return self._graphs.run(batch), batch.sampled_tokens

    @torch.inference_mode()
    def capture_decodes(self, max_num_seqs: int, num_drafts: int, capture: Capture) -> None:
        """From now on, steps of decodes alone are replayed. Takes a fraction of a second for each captured size."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._graphs = DecodeGraphs(
            lambda batch: self._model.forward(batch, self._kv_cache), self._rope_tables,
            captured_sizes(max_num_seqs), self._max_blocks, self._device, capture, 1 + num_drafts,
        )  # fmt: skip
