"""Architectures by the name that config.json gives them; a file is imported when its architecture is wanted."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.engine.models.config import ModelConfig, read_raw_config
from kvasir.engine.models.rope import inverse_frequencies

if TYPE_CHECKING:
    from kvasir.engine.models.llama import LlamaForCausalLM

ARCHITECTURES = {
    "Gemma2ForCausalLM": "kvasir.engine.models.gemma",
    "Gemma3ForCausalLM": "kvasir.engine.models.gemma",
    "LlamaForCausalLM": "kvasir.engine.models.llama",
    "MistralForCausalLM": "kvasir.engine.models.llama",
    "MixtralForCausalLM": "kvasir.engine.models.mixtral",
    "Phi3ForCausalLM": "kvasir.engine.models.phi",
    "Qwen2ForCausalLM": "kvasir.engine.models.qwen",
    "Qwen3ForCausalLM": "kvasir.engine.models.qwen",
    "Qwen3MoeForCausalLM": "kvasir.engine.models.qwen",
}


def read_model_config(directory: Path) -> ModelConfig:
    """UnsupportedModel: we do not know it, or a field of it."""
    raw = read_raw_config(directory, ARCHITECTURES)
    config = model_class(raw["architectures"][0]).read_config(raw)
    for length in (config.max_position, config.longest):
        for rope in config.for_length(length).ropes:
            inverse_frequencies(rope, config.head_dim)
    return config


def model_class(architecture: str) -> "type[LlamaForCausalLM]":
    cls: type[LlamaForCausalLM] = getattr(import_module(ARCHITECTURES[architecture]), architecture)
    return cls
