"""What a checkpoint's config.json says, checked: a field we do not understand is an error here, not noise later."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.engine.models.rope import RopeConfig, for_length, read_rope_config


class UnsupportedModel(Exception):
    """The model cannot be served; the message names what stands in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig, ...]  # the rotations that its layers use
    rope_of_layer: tuple[int, ...]
    tie_word_embeddings: bool
    checkpoint_dtype: str
    windows: tuple[int, ...]  # by layer, how many tokens a token sees, itself included; 0: all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def max_position(self) -> int:
        """How many tokens a sequence is meant to have at most."""
        return min(rope.max_position for rope in self.ropes)

    @property
    def longest(self) -> int:
        """How many it can have, where more are asked for."""
        return min(rope.longest for rope in self.ropes)

    def for_length(self, max_model_len: int) -> "ModelConfig":
        """The model that serves sequences of up to so many tokens."""
        return replace(self, ropes=tuple(for_length(rope, max_model_len) for rope in self.ropes))


def read_json(path: Path) -> dict[str, Any]:
    """{} if there is no such file."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def read_raw_config(directory: Path, known_architectures: Mapping[str, object]) -> dict[str, Any]:
    """config.json, with what no architecture of ours can do refused."""
    raw = read_json(directory / "config.json")
    if not raw:
        raise UnsupportedModel(f"{directory} has no config.json; it must be a Hugging Face model directory")
    architectures = raw.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in known_architectures:
        names = ", ".join(map(str, architectures)) or "none"
        raise UnsupportedModel(f"unknown architecture {names}; known are {', '.join(known_architectures)}")
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        raise UnsupportedModel(f"quantized weights ({quantization.get('quant_method', 'unnamed')}) are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"unknown hidden_act {raw['hidden_act']!r}; known is silu")
    return raw


def model_config(raw: Mapping[str, Any], **of_architecture: Any) -> ModelConfig:
    """What all architectures have in common, and `of_architecture`, where they differ."""
    num_heads, num_layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    fields: dict[str, Any] = {
        "architecture": raw["architectures"][0],
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "ropes": (),
        "rope_of_layer": (0,) * num_layers,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "checkpoint_dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
        "windows": (0,) * num_layers,
    }
    fields |= of_architecture
    return ModelConfig(**(fields | {"ropes": fields["ropes"] or (read_rope_config(raw),)}))


def eos_token_ids(directory: Path) -> frozenset[int]:
    """The union of what generation_config.json, config.json and tokenizer_config.json call the end."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        named = read_json(directory / name).get("eos_token_id")
        ids.update(named if isinstance(named, list) else [] if named is None else [named])
    token = read_json(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):  # an added token, written out
        token = token.get("content")
    if token is not None:
        ids.update(_token_ids(directory, str(token)))
    return frozenset(ids)


def _token_ids(directory: Path, token: str) -> set[int]:
    tokenizer = read_json(directory / "tokenizer.json")
    added = {entry["id"] for entry in tokenizer.get("added_tokens") or () if entry["content"] == token}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and token in vocabulary:
        added.add(vocabulary[token])
    return added
