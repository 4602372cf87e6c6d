"""Rotary position embedding: how a position turns into angles, for each kind of scaling.

Unknown kinds and unknown keys are errors: a half-read scaling gives fluent nonsense past the original length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvasir.engine.models.unsupported import UnsupportedModel

RopeTable = tuple[Tensor, Tensor]

_COMMON_KEYS = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"
}  # fmt: skip
_KEYS = {
    "default": _COMMON_KEYS,
    "linear": _COMMON_KEYS,
    "dynamic": _COMMON_KEYS,
    "yarn": _COMMON_KEYS | {"attention_factor", "beta_fast", "beta_slow", "truncate"},
    "llama3": _COMMON_KEYS | {"low_freq_factor", "high_freq_factor"},
    "longrope": _COMMON_KEYS | {"attention_factor", "short_factor", "long_factor"},
}
_OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """What a kind does not use keeps its default."""

    kind: str = "default"
    theta: float = 10_000.0
    rotary_share: float = 1.0  # of the dimensions of a head, the first ones, are rotated
    factor: float = 1.0
    original_max_position: int = 0  # the length the model was trained for, before scaling
    max_position: int = 0  # the length it is meant to be used for
    longest: int = 0  # the length it can be used for, where one asks for more
    stretched_to: int = 0  # the length that the angles are made for, where they depend on it (`for_length`)
    attention_factor: float = 1.0  # of cosine and sine
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()  # of "longrope", a number for each pair of dimensions
    long_factors: tuple[float, ...] = ()


def read_rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """From a whole config.json: `rope_parameters` (new), or `rope_theta` and `rope_scaling` (old)."""
    return rope_config(raw, {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})})


def rope_config(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> RopeConfig:
    """`scaling` holds the parameters of this one rotation; what it leaves open is taken from `raw`, the config.json."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in _KEYS:
        raise UnsupportedModel(f"unknown rope type {kind!r}; known are {', '.join(_KEYS)}")
    unknown = scaling.keys() - _KEYS[kind]
    if unknown:
        raise UnsupportedModel(f"rope type {kind!r} with unknown keys: {', '.join(sorted(unknown))}")
    max_position = int(raw.get("max_position_embeddings", 2048))
    original = int(
        raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or max_position
    )
    if kind == "dynamic":
        original = max_position
    derives_factor = kind in ("yarn", "longrope")
    factor = float(scaling.get("factor") or (max_position / original if derives_factor else 1.0))
    if kind == "linear":
        max_position = int(max_position * factor)
    elif kind == "yarn":
        max_position = max(max_position, int(original * factor))
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rotary_share=float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0),
        factor=factor,
        original_max_position=original,
        max_position=max_position,
        longest=int(max_position * factor) if kind == "dynamic" else max_position,
        attention_factor=_attention_factor(kind, scaling.get("attention_factor"), factor, original),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4)),
        short_factors=tuple(map(float, scaling.get("short_factor") or ())),
        long_factors=tuple(map(float, scaling.get("long_factor") or ())),
    )


def _attention_factor(kind: str, given: float | None, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if given is not None:
        return float(given)
    if factor <= 1:
        return 1.0
    return 0.1 * math.log(factor) + 1 if kind == "yarn" else math.sqrt(1 + math.log(factor) / math.log(original))


def for_length(config: RopeConfig, num_positions: int) -> RopeConfig:
    """The rotation for sequences of up to so many tokens.

    "longrope" and "dynamic" turn by other angles once a sequence is longer than the original length: all tokens of it,
    the first ones too. A cache that requests share cannot follow, since keys that were turned one way cannot serve the
    other. So it is decided once for all requests, by the longest sequence that is to be served.
    """
    is_stretched = num_positions > config.original_max_position
    if config.kind == "longrope":
        return replace(config, stretched_to=config.max_position if is_stretched else 0)
    if config.kind == "dynamic":
        return replace(config, stretched_to=num_positions if is_stretched else 0)
    return config


def rope_tables(ropes: Sequence[RopeConfig], head_dim: int, num_positions: int) -> tuple[RopeTable, ...]:
    """For each rotation, cosine and sine [num_positions, R / 2] float32, where R of the D dimensions are rotated."""
    return tuple(_rope_table(rope, head_dim, num_positions) for rope in ropes)


def _rope_table(config: RopeConfig, head_dim: int, num_positions: int) -> RopeTable:
    stretches = config.kind in ("longrope", "dynamic")
    if stretches and num_positions > max(config.original_max_position, config.stretched_to):
        raise UnsupportedModel(f"rope type {config.kind!r} is made for fewer than {num_positions} positions")
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies(config, head_dim))
    return angles.cos() * config.attention_factor, angles.sin() * config.attention_factor


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, for each pair of the dimensions that are rotated: [R / 2]"""
    rotary_dim = int(head_dim * config.rotary_share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedModel(f"{rotary_dim} of {head_dim} dimensions cannot be rotated in pairs")
    exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "dynamic" and config.stretched_to:
        stretch = config.factor * config.stretched_to / config.original_max_position - (config.factor - 1)
        theta: float = config.theta * stretch ** (rotary_dim / (rotary_dim - 2))
        return 1.0 / (theta**exponents)
    if config.kind == "yarn":
        return _yarn(config, plain, rotary_dim)
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "longrope":
        factors = config.long_factors if config.stretched_to else config.short_factors
        if len(factors) != len(plain):
            raise UnsupportedModel(f"rope type 'longrope' with {len(factors)} factors for {len(plain)} pairs")
        return 1.0 / (torch.tensor(factors) * config.theta**exponents)
    return plain


def _yarn(config: RopeConfig, plain: Tensor, rotary_dim: int) -> Tensor:
    """Fast dimensions as trained, slow ones stretched by `factor`, a ramp between them."""

    def dimension_with(num_rotations: float) -> float:
        ratio = config.original_max_position / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Short waves as trained, long ones stretched by `factor`, smoothly in between."""
    waves_in_training = config.original_max_position * plain / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = ((waves_in_training - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / config.factor + smooth * plain
