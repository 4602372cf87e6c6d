"""Phi-3, Phi-3.5, Phi-4-mini: a Llama whose checkpoint holds joined matrices, and that may rotate a part of a head."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvasir.engine.models.config import ModelConfig, model_config
from kvasir.engine.models.layers import Weights
from kvasir.engine.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return model_config(raw, windows=(raw.get("sliding_window") or 0,) * raw["num_hidden_layers"])

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, _parts(config, weights))


def _parts(config: ModelConfig, weights: Weights) -> Weights:
    """The rows of `qkv_proj` and `gate_up_proj` under the names that others give them."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, queries + keys),
        "v_proj": ("qkv_proj", queries + keys, queries + 2 * keys),
        "gate_proj": ("gate_up_proj", 0, config.intermediate_size),
        "up_proj": ("gate_up_proj", config.intermediate_size, 2 * config.intermediate_size),
    }

    def tensor(name: str) -> Tensor:
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in rows:
            return weights(name)
        joined, first, last = rows[part]
        return weights(f"{prefix}.{joined}.weight")[first:last]

    return tensor
