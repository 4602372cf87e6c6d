"""What the fields of a GGUF file mean, whatever the model."""

from collections.abc import Mapping
from typing import Any

import numpy as np

# Kinds of tokens
CONTROL = 3  # special: no part of a text
USER_DEFINED = 4  # taken out of a text before anything else, longest first


_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def tensor_name(name: str, of_layers: Mapping[str, str]) -> str:
    """As Hugging Face has it.   blk.7.attn_q.weight  ->  model.layers.7.self_attn.q_proj.weight"""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in of_layers:
            return f"model.layers.{layer}.{of_layers[part]}.weight"
        case [part, "weight"] if part in _TENSOR_NAMES:
            return f"{_TENSOR_NAMES[part]}.weight"
    raise ValueError(f"unknown tensor {name!r}")


def refuse_other_values(fields: dict[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if fields.get(name) != value:
            raise ValueError(f"{name} is {fields.get(name)!r}; only {value!r} can be converted")


def shortest(value: float) -> float:
    """The number that was meant: GGUF stores float32.   9.999999747378752e-06  ->  1e-05"""
    return float(str(np.float32(value)))


def tokens_of_kind(fields: dict[str, Any], wanted: int) -> list[str]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
