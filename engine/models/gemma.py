"""Gemma 2 and 3 (text): four norms a layer, scaled embeddings, layers that see a window; soft caps in Gemma 2."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.engine.models.config import ModelConfig, activation, model_config, windows_of
from kvasir.engine.models.layers import Weights
from kvasir.engine.models.llama import DecoderLayer, LlamaForCausalLM
from kvasir.engine.models.rope import rope_config
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.rms_norm import rms_norm

# Shapes: T tokens in this step  C hidden size


class GemmaLayer(DecoderLayer):
    """What attention and feed-forward give is normalised too, before it is added to the residual."""

    middle_norm = "pre_feedforward_layernorm"

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        super().__init__(config, weights, layer)
        self._attended_norm = weights(f"model.layers.{layer}.post_attention_layernorm.weight")
        self._output_norm = weights(f"model.layers.{layer}.post_feedforward_layernorm.weight")

    def __call__(self, hidden: Tensor, residual: Tensor, batch: BatchInputs, kv_cache: Tensor) -> Tensor:
        """hidden [T, C] is still to be added to residual [T, C], which is updated in place."""
        hidden = self._attention(rms_norm(hidden, self._input_norm, self._eps, residual), batch, kv_cache)
        hidden = rms_norm(hidden, self._attended_norm, self._eps)
        hidden = self._feed_forward(rms_norm(hidden, self._middle_norm, self._eps, residual))
        return rms_norm(hidden, self._output_norm, self._eps)


class Gemma2ForCausalLM(LlamaForCausalLM):
    layer_class = GemmaLayer

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return _config(raw, _layer_types(raw, full_every=2))

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, _norms_of_one_plus(weights))


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        kinds = _layer_types(raw, full_every=raw.get("sliding_window_pattern") or 6)
        scaling = raw.get("rope_parameters") or {
            "full_attention": {"rope_theta": raw.get("rope_theta")} | (raw.get("rope_scaling") or {}),
            "sliding_attention": {"rope_theta": raw.get("rope_local_base_freq")},
        }
        full = rope_config(raw, {"rope_theta": 1e6} | _given(scaling.get("full_attention")))
        sliding = rope_config(raw, {"rope_theta": 1e4} | _given(scaling.get("sliding_attention")))
        return _config(
            raw, kinds, qk_norm=True, ropes=(full, sliding),
            rope_of_layer=tuple(int(kind == "sliding_attention") for kind in kinds),
        )  # fmt: skip


def _config(raw: Mapping[str, Any], kinds: list[str], **of_architecture: Any) -> ModelConfig:
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is set: the model does not generate")
    bias = bool(raw.get("attention_bias", False))
    fields: dict[str, Any] = {
        "qkv_bias": bias,
        "output_bias": bias,
        "windows": windows_of(kinds, raw.get("sliding_window", 4096)),
        "activation": activation(raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"),
        "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping") or 0.0,
        "logits_softcap": raw.get("final_logit_softcapping") or 0.0,
        "embedding_scale": raw["hidden_size"] ** 0.5,
        "overflows_float16": True,
    }
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    return model_config(defaults | dict(raw), **(fields | of_architecture))


def _layer_types(raw: Mapping[str, Any], full_every: int) -> list[str]:
    return raw.get("layer_types") or [
        "sliding_attention" if (layer + 1) % full_every else "full_attention"
        for layer in range(raw["num_hidden_layers"])
    ]


def _given(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _norms_of_one_plus(weights: Weights) -> Weights:
    """The checkpoint stores how far the weight of a norm is from 1."""

    def tensor(name: str) -> Tensor:
        weight = weights(name)
        return (1 + weight.float()).to(weight.dtype) if name.endswith("norm.weight") else weight

    return tensor
