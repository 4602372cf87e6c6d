"""The layers that the architectures share. Weights are packed as they are loaded; nothing keeps a second copy."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.tensor_parallel.group import current_group
from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.gelu_mul import gelu_mul
from kvasir.kernels.linear import PackedLinear
from kvasir.kernels.prefill_attention import prefill_attention
from kvasir.kernels.qk_norm import qk_norm
from kvasir.kernels.quantized import GroupedWeight, joined
from kvasir.kernels.silu_mul import silu_mul
from kvasir.kernels.write_kv import write_kv

# Shapes: T tokens in this step  C hidden size  I intermediate size  H query heads  K KV heads  D head dim  E experts

_LEAST_ROWS = 3  # of a product that chooses experts


class Weights(Protocol):
    """Where tensors come from, by name; in the model's dtype and on its device.

    In a quantized checkpoint the weight of a linear layer is a `GroupedWeight`, which can be cut by rows as a tensor.
    """

    def __call__(self, name: str) -> Tensor: ...


def fused_linear(weights: Weights, names: list[str], bias: bool) -> PackedLinear:
    """This rank's outputs of several layers with one input, as one product; the outputs lie side by side."""
    group = current_group()
    matrices = [group.own_outputs(weights(f"{name}.weight")) for name in names]
    biases = [weights(f"{name}.bias") for name in names] if bias else []
    biases = [each[group.share_of(len(each))] for each in biases]
    return PackedLinear(_side_by_side(matrices), torch.cat(biases) if biases else None)


def partial_linear(weights: Weights, name: str, bias: bool) -> PackedLinear:
    """Of this rank's inputs; what all ranks give adds up to the layer's output. The bias is added once."""
    group = current_group()
    matrix = group.own_inputs(weights(f"{name}.weight"))
    return PackedLinear(matrix, weights(f"{name}.bias") if bias and group.rank == 0 else None)


def _side_by_side(matrices: Sequence[Tensor | GroupedWeight]) -> Tensor | GroupedWeight:
    if len(matrices) == 1:
        return matrices[0]
    grouped = [each for each in matrices if isinstance(each, GroupedWeight)]
    if len(grouped) == len(matrices):
        return joined(grouped)
    return torch.cat([each.dequantized() if isinstance(each, GroupedWeight) else each for each in matrices])


class Attention:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int) -> None:
        self._config = config
        self._layer = layer
        inputs = [f"{prefix}.{name}_proj" for name in "qkv"]
        self._group = current_group()
        self._num_heads = config.num_heads // self._group.size
        self._num_kv_heads = config.num_kv_heads // self._group.size
        self._qkv = fused_linear(weights, inputs, config.qkv_bias)
        self._output = partial_linear(weights, f"{prefix}.o_proj", config.output_bias)
        self._head_norms = [weights(f"{prefix}.{name}_norm.weight") for name in "qk"] if config.qk_norm else []

    def __call__(self, hidden: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """[T, C] -> [T, C]"""
        config = self._config
        qkv = self._qkv(hidden)
        if config.qk_norm:
            query_norm, key_norm = self._head_norms
            qk_norm(qkv, query_norm, key_norm, self._num_heads, self._num_kv_heads, config.rms_norm_eps)
        cos, sin = batch.ropes[config.rope_of_layer[self._layer]]
        write_kv(qkv, cos, sin, batch.slot_mapping, kv_cache, self._layer)
        attended = qkv.new_empty(len(qkv), self._num_heads * config.head_dim)
        self._attend(qkv, batch, kv_cache, attended)
        return self._group.sum(self._output(attended))

    def _attend(self, qkv: Tensor, batch: BatchInputs, kv_cache: Tensor, out: Tensor) -> None:
        config = self._config
        scale, window, softcap = config.attention_scale, config.windows[self._layer], config.attention_softcap
        first, split = batch.num_decodes, batch.num_decodes * batch.tokens_each  # sequence and token behind them
        if split > 0:
            decode_attention(
                qkv[:split], kv_cache, self._layer, batch.block_tables[:first], batch.seq_lens[:first],
                out[:split], scale=scale, window=window, softcap=softcap,
            )  # fmt: skip
        if split < len(qkv):
            prefill_attention(
                qkv[split:], kv_cache, self._layer, batch.block_tables[first:], batch.query_starts,
                batch.seq_lens[first:], out[split:], scale=scale, window=window, softcap=softcap,
            )  # fmt: skip


def feed_forward(config: ModelConfig, weights: Weights, prefix: str, layer: int) -> "FeedForward | ExpertFeedForward":
    is_dense = config.experts is None or layer not in config.experts.layers
    return (FeedForward if is_dense else ExpertFeedForward)(config, weights, prefix)


class FeedForward:
    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        self._group = current_group()
        self._gate_up = fused_linear(weights, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], config.mlp_bias)
        self._down = partial_linear(weights, f"{prefix}.down_proj", config.mlp_bias)
        self._activate = silu_mul if config.activation == "silu" else gelu_mul

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, C] -> [T, C]"""
        return self._group.sum(self.partial(hidden))

    def partial(self, hidden: Tensor) -> Tensor:
        """[T, C] -> [T, C], this rank's part of the sum"""
        return self._down(self._activate(self._gate_up(hidden)))


class ExpertFeedForward:
    """Each token goes to a few of many feed-forward layers, and takes the sum of what they give, weighted."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        assert config.experts is not None
        self._config = config.experts
        self._group = current_group()
        self._router = PackedLinear(weights(f"{prefix}.gate.weight"), is_exact=True)
        self._experts = [FeedForward(config, weights, f"{prefix}.experts.{i}") for i in range(self._config.count)]

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, C] -> [T, C]; each expert computes its own tokens alone"""
        probabilities = self._route(hidden).float().softmax(dim=-1)  # [T, E]
        shares, chosen = probabilities.topk(self._config.per_token, dim=-1)
        if self._config.normalises:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(hidden)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            share = shares[tokens, places, None].to(hidden.dtype)
            out.index_add_(0, tokens, self._experts[expert].partial(hidden[tokens]) * share)
        return self._group.sum(out)

    def _route(self, hidden: Tensor) -> Tensor:
        """[T, C] -> [T, E]; the same for few tokens: on a CPU, products of one and two rows add up in another order."""
        missing = _LEAST_ROWS - len(hidden) if hidden.device.type == "cpu" else 0
        if missing <= 0:
            return self._router(hidden)
        return self._router(torch.nn.functional.pad(hidden, (0, 0, 0, missing)))[: len(hidden)]
