"""Tiny random checkpoints, written as transformers writes them, and what transformers computes from them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 96
_CLASSES = {
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}


def save_checkpoint(
    directory: Path, kind: str = "llama", *, dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **options: Any
) -> Any:
    """The model, as transformers has it; eager attention, so that it is plain arithmetic."""
    config_class, model_class = _CLASSES[kind]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(5)
    model = model_class(config_class(**(fields | options))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.3, 1.7)  # not the ones and zeros that hide a forgotten one
    model = model.to(dtype)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None takes a field out."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content = {name: value for name, value in (content | changes).items() if value is not None}
    path.write_text(json.dumps(content))


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[T, V]"""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
