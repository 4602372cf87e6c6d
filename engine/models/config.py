"""What a checkpoint's config.json says, checked: a field we do not understand is an error here, not noise later."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.engine.models.packed_checkpoint import Packing, read_packing
from kvasir.engine.models.rope import RopeConfig, for_length, read_rope_config
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.linear import Quantization

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward layers of which each token is given to a few."""

    count: int
    per_token: int
    intermediate_size: int
    normalises: bool  # the weights of a token's experts add up to 1
    layers: tuple[int, ...]  # that have experts; the others are dense


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that decides what the weights mean; a KV block's identity covers every field."""

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
    activation: str = "silu"  # or "gelu_tanh"
    attention_scale: float  # of query times key
    attention_softcap: float = 0.0  # c > 0: scores become c tanh(score / c)
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    experts: Experts | None = None
    packing: Packing | None = None  # of the checkpoint's weights
    quantization: Quantization = "none"  # of its weights, as they are loaded
    overflows_float16: bool = False  # made for bfloat16: its activations are larger than float16 can say

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
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UnsupportedModel(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def read_raw_config(directory: Path, known_architectures: Mapping[str, object]) -> dict[str, Any]:
    """config.json, with what no architecture of ours can do refused."""
    if directory.suffix == ".gguf":
        raise UnsupportedModel(f"{directory} is a GGUF file; kvasir model convert makes a model directory of it")
    raw = read_json(directory / "config.json")
    if not raw:
        raise UnsupportedModel(f"{directory} has no config.json; it must be a Hugging Face model directory")
    architectures = raw.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in known_architectures:
        names = ", ".join(map(str, architectures)) or "none"
        raise UnsupportedModel(f"unknown architecture {names}; known are {', '.join(known_architectures)}")
    return raw


def model_config(raw: Mapping[str, Any], **of_architecture: Any) -> ModelConfig:
    """What all architectures have in common, and `of_architecture`, where they differ."""
    num_heads, num_layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    fields: dict[str, Any] = {
        "architecture": raw["architectures"][0],
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "attention_scale": head_dim**-0.5,
        "activation": activation(raw.get("hidden_act", "silu")),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "ropes": (),
        "rope_of_layer": (0,) * num_layers,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "checkpoint_dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
        "windows": (0,) * num_layers,
        "packing": read_packing(raw),
    }
    fields |= of_architecture
    return ModelConfig(**(fields | {"ropes": fields["ropes"] or (read_rope_config(raw),)}))


def activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"unknown activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def windows_of(kinds: Sequence[str], window: int | None) -> tuple[int, ...]:
    """By layer, from the `layer_types` of a config."""
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"unknown layer types: {', '.join(sorted(unknown))}")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in kinds)


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
