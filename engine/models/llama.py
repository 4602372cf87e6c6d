"""Llama 2 and 3, SmolLM2, Mistral; and, with what `read_config` says of them, their relatives."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.engine.models.config import ModelConfig, model_config
from kvasir.engine.models.layers import Attention, Weights, feed_forward
from kvasir.engine.models.recorded import RecordedLayers
from kvasir.kernels.linear import PackedLinear
from kvasir.kernels.rms_norm import rms_norm

# Shapes: T tokens in this step  R rows that need logits  C hidden size  V vocabulary
#   N blocks  L layers  B tokens a block  K KV heads  D head dim


class DecoderLayer:
    middle_norm: ClassVar[str] = "post_attention_layernorm"  # before the feed-forward layer

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self._eps = config.rms_norm_eps
        self._input_norm = weights(f"{prefix}.input_layernorm.weight")
        self._attention = Attention(config, weights, f"{prefix}.self_attn", layer)
        self._middle_norm = weights(f"{prefix}.{self.middle_norm}.weight")
        self._feed_forward = feed_forward(config, weights, f"{prefix}.mlp", layer)

    def __call__(self, hidden: Tensor, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """hidden [T, C] is still to be added to residual [T, C], which is updated in place."""
        hidden = self._attention(rms_norm(hidden, self._input_norm, self._eps, residual), batch, kv_cache)
        return self._feed_forward(rms_norm(hidden, self._middle_norm, self._eps, residual))


class LlamaForCausalLM:
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        bias = bool(raw.get("attention_bias", False))
        return model_config(raw, qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._embedding = weights("model.embed_tokens.weight")
        self._layers = [self.layer_class(config, weights, layer) for layer in range(config.num_layers)]
        self._recorded = RecordedLayers(self._through_layers)
        self._norm = weights("model.norm.weight")
        head = self._embedding if config.tie_word_embeddings else weights("lm_head.weight")
        self._head = PackedLinear(head, is_head=True)

    def forward(self, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """-> hidden [T, C]; writes the step's keys and values into kv_cache [N, L, 2, K, B, D]"""
        residual = torch.nn.functional.embedding(batch.token_ids, self._embedding)
        if self.config.embedding_scale != 1:
            residual *= torch.tensor(self.config.embedding_scale, dtype=residual.dtype)
        return self._recorded(residual, batch, kv_cache)

    def _through_layers(self, hidden: Tensor, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        for layer in self._layers:
            hidden = layer(hidden, residual, batch, kv_cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C], the rows that need logits -> [R, V] float32"""
        logits = self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()
        cap = self.config.logits_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap > 0 else logits


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return model_config(raw, windows=(raw.get("sliding_window") or 0,) * raw["num_hidden_layers"])
