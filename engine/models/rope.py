"""Rotary position embedding: how a position turns into angles, for each kind of scaling.

Unknown kinds and unknown keys are errors: a half-read scaling gives fluent nonsense past the original length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {
    "default": _COMMON_KEYS | {"factor", "original_max_position_embeddings"},
    "linear": _COMMON_KEYS | {"factor", "original_max_position_embeddings"},
    "dynamic": _COMMON_KEYS | {"factor", "original_max_position_embeddings"},
    "yarn": _COMMON_KEYS
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"},
    "llama3": _COMMON_KEYS
    | {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip


class UnsupportedRope(Exception):
    """The message names the kind or the key that is not understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """What a kind does not use keeps its default."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0  # the length the model was trained for, before scaling
    max_position: int = 0  # the length it can be used for
    attention_factor: float = 1.0  # of cosine and sine
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def read_rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """From a whole config.json: `rope_parameters` (new), or `rope_theta` and `rope_scaling` (old)."""
    scaling: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _KEYS:
        raise UnsupportedRope(f"unknown rope type {kind!r}; known are {', '.join(_KEYS)}")
    unknown = scaling.keys() - _KEYS[kind]
    if unknown:
        raise UnsupportedRope(f"rope type {kind!r} with unknown keys: {', '.join(sorted(unknown))}")
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise UnsupportedRope("partial_rotary_factor other than 1 is not supported")
    longest = int(raw.get("max_position_embeddings", 2048))
    original = int(
        raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or longest
    )
    factor = float(scaling.get("factor") or (longest / original if kind == "yarn" else 1.0))
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        factor=factor,
        original_max_position=original,
        max_position=_max_position(kind, longest, original, factor),
        attention_factor=_attention_factor(scaling.get("attention_factor"), factor) if kind == "yarn" else 1.0,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4)),
    )


def _max_position(kind: str, longest: int, original: int, factor: float) -> int:
    if kind == "linear":
        return int(longest * factor)
    if kind == "yarn":
        return max(longest, int(original * factor))
    # "dynamic": past `longest`, every new token would turn all earlier keys by another angle, which a cache that
    # requests share cannot follow. Up to there the scaling does nothing.
    return longest


def _attention_factor(given: float | None, factor: float) -> float:
    if given is not None:
        return float(given)
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rope_table(config: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [num_positions, head_dim / 2], float32."""
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies(config, head_dim))
    return angles.cos() * config.attention_factor, angles.sin() * config.attention_factor


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, for each pair of dimensions: [head_dim / 2]"""
    plain = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    if config.kind == "llama3":
        return _llama3(config, plain)
    return plain


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Fast dimensions as trained, slow ones stretched by `factor`, a ramp between them."""

    def dimension_with(num_rotations: float) -> float:
        ratio = config.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension_with(config.beta_fast), dimension_with(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * stretched + plain * (1 - stretched)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Short waves as trained, long ones stretched by `factor`, smoothly in between."""
    waves_in_training = config.original_max_position * plain / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = ((waves_in_training - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / config.factor + smooth * plain
