"""Mixtral: Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvasir.engine.models.config import Experts, ModelConfig, model_config
from kvasir.engine.models.layers import Weights
from kvasir.engine.models.llama import LlamaForCausalLM

_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
}


class MixtralForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> ModelConfig:
        experts = Experts(
            count=raw["num_local_experts"],
            per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["intermediate_size"],
            normalises=True,
            layers=tuple(range(raw["num_hidden_layers"])),
        )
        windows = (raw.get("sliding_window") or 0,) * raw["num_hidden_layers"]
        return model_config(raw, experts=experts, windows=windows)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, _renamed(weights))


def _renamed(weights: Weights) -> Weights:
    def tensor(name: str) -> Tensor:
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        return weights(name)

    return tensor
