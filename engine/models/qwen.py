"""Qwen2 (biased queries, keys and values) and Qwen3 (normalised queries and keys)."""

from collections.abc import Mapping
from typing import Any

from kvasir.engine.models.config import ModelConfig, UnsupportedModel, model_config
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


def _windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    first_sliding = raw.get("max_window_layers", 28)
    kinds = raw.get("layer_types") or [
        "sliding_attention" if window and layer >= first_sliding else "full_attention" for layer in range(num_layers)
    ]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"unknown layer types: {', '.join(sorted(unknown))}")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)
