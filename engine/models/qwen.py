"""Qwen2 (biased queries, keys and values) and Qwen3 (normalised queries and keys), dense or with experts."""

from collections.abc import Mapping
from typing import Any

from kvasir.engine.models.config import Experts, ModelConfig, model_config, windows_of
from kvasir.engine.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return model_config(raw, qkv_bias=True, windows=_windows(raw))


class Qwen3ForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        bias = bool(raw.get("attention_bias", False))
        return model_config(raw, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=_windows(raw))


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
        experts = Experts(
            count=raw.get("num_experts") or raw["num_local_experts"],  # newer transformers say the latter
            per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["moe_intermediate_size"],
            normalises=bool(raw.get("norm_topk_prob", False)),
            layers=tuple(i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0),
        )
        bias = bool(raw.get("attention_bias", False))
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        return model_config(
            raw, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=experts,
            windows=(window or 0,) * raw["num_hidden_layers"],
        )  # fmt: skip


def _windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    first_sliding = raw.get("max_window_layers", 28)
    kinds = raw.get("layer_types") or [
        "sliding_attention" if window and layer >= first_sliding else "full_attention" for layer in range(num_layers)
    ]
    return windows_of(kinds, window)
