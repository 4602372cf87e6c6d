"""The layers that the architectures share. Weights are packed as they are loaded; nothing keeps a second copy."""

from typing import Protocol

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.engine.models.config import ModelConfig
from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.linear import PackedLinear
from kvasir.kernels.prefill_attention import prefill_attention
from kvasir.kernels.rms_norm import rms_norm
from kvasir.kernels.silu_mul import silu_mul
from kvasir.kernels.write_kv import write_kv

# Shapes: T tokens in this step  C hidden size  I intermediate size  H query heads  K KV heads  D head dim


class Weights(Protocol):
    """Where tensors come from, by name; in the model's dtype and on its device."""

    def __call__(self, name: str) -> Tensor: ...


def fused_linear(weights: Weights, names: list[str], bias: bool) -> PackedLinear:
    """Several layers with one input as one product; the outputs lie side by side."""
    matrices = [weights(f"{name}.weight") for name in names]
    biases = [weights(f"{name}.bias") for name in names] if bias else []
    return PackedLinear(
        torch.cat(matrices) if len(matrices) > 1 else matrices[0], torch.cat(biases) if biases else None
    )


class Attention:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int) -> None:
        self._config = config
        self._layer = layer
        inputs = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._qkv = fused_linear(weights, inputs, config.qkv_bias)
        self._output = fused_linear(weights, [f"{prefix}.o_proj"], config.output_bias)
        self._query_norm = weights(f"{prefix}.q_norm.weight") if config.qk_norm else None
        self._key_norm = weights(f"{prefix}.k_norm.weight") if config.qk_norm else None

    def __call__(self, hidden: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """[T, C] -> [T, C]"""
        config = self._config
        qkv = self._qkv(hidden)
        self._normalise(qkv, self._query_norm, 0, config.num_heads)
        self._normalise(qkv, self._key_norm, config.num_heads, config.num_kv_heads)
        cos, sin = batch.ropes[config.rope_of_layer[self._layer]]
        write_kv(qkv, cos, sin, batch.slot_mapping, kv_cache, self._layer)
        attended = qkv.new_empty(len(qkv), config.num_heads * config.head_dim)
        self._attend(qkv, batch, kv_cache, attended)
        return self._output(attended)

    def _attend(self, qkv: Tensor, batch: BatchInputs, kv_cache: Tensor, out: Tensor) -> None:
        scale, window = self._config.head_dim**-0.5, self._config.windows[self._layer]
        split = batch.num_decodes
        if split > 0:
            decode_attention(
                qkv[:split], kv_cache, self._layer, batch.block_tables[:split], batch.seq_lens[:split],
                out[:split], scale=scale, window=window,
            )  # fmt: skip
        if split < len(qkv):
            prefill_attention(
                qkv[split:], kv_cache, self._layer, batch.block_tables[split:], batch.query_starts,
                batch.seq_lens[split:], out[split:], scale=scale, window=window,
            )  # fmt: skip

    def _normalise(self, qkv: Tensor, weight: Tensor | None, first_head: int, num_heads: int) -> None:
        if weight is None:
            return
        head_dim = self._config.head_dim
        heads = qkv[:, first_head * head_dim : (first_head + num_heads) * head_dim]
        normalised = rms_norm(heads.reshape(-1, head_dim), weight, self._config.rms_norm_eps)
        heads.copy_(normalised.view(heads.shape))


class FeedForward:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        self._gate_up = fused_linear(weights, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], config.mlp_bias)
        self._down = fused_linear(weights, [f"{prefix}.down_proj"], config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, C] -> [T, C]"""
        return self._down(silu_mul(self._gate_up(hidden)))
