"""Phi-3, Phi-3.5, Phi-4-mini: Mistral, but for a checkpoint of joined matrices; it may rotate a part of a head."""

from torch import Tensor

from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.layers import Weights
from kvasir.engine.models.llama import MistralForCausalLM


class Phi3ForCausalLM(MistralForCausalLM):
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
