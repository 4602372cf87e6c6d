"""What no step can be faster than, and how far each one is from it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from kvasir.engine.models.config import ModelConfig

PYTHON = ("schedule", "build the batch", "sample", "commit")  # parts of a step that are not the model
# In groups of 32, weights of 8 bits have a scale of 16 bits for each group, those of 4 bits a scale and an offset.
_BITS_8, _BITS_4 = 1 + 2 / 32, 0.5 + 4 / 32
_BYTES_OF_A_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": _BITS_8, "w8a8": _BITS_8, "int4": _BITS_4, "w4a8": _BITS_4}


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences that have `context` tokens computed each, and compute `num_tokens` more."""

    num_seqs: int
    context: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.context + self.num_tokens

    @property
    def name(self) -> str:
        if self.num_tokens == 1:
            return f"decode, {self.num_seqs} with {self.context:,} tokens each"
        return f"prefill, {self.num_tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class Floors:
    bytes_per_s: float  # of reading memory
    flop_per_s: float  # of a large product


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's steps are made of."""

    layer_weights: int  # of all layers' products
    head_weights: int
    kv_bytes_of_a_token: float
    attention_width: int  # of all layers' query heads

    @classmethod
    def of(cls, config: ModelConfig, kv_bytes_of_a_token: float) -> Self:
        size, queries = config.hidden_size, config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        layer = size * (2 * queries + 2 * keys) + 3 * size * config.intermediate_size
        return cls(
            config.num_layers * layer, size * config.vocab_size, kv_bytes_of_a_token, config.num_layers * queries
        )


def floor_s(work: Work, form: str, floors: Floors, case: Case) -> float:
    """The longer one of what must be read and what must be computed."""
    bytes_of_a_weight = _BYTES_OF_A_WEIGHT[form]
    weights = bytes_of_a_weight * work.layer_weights + max(bytes_of_a_weight, _BITS_8) * work.head_weights
    read_bytes = weights + case.num_seqs * case.context * work.kv_bytes_of_a_token
    pairs = case.num_tokens * case.context + case.num_tokens * (case.num_tokens + 1) / 2  # of a query and a key
    products = 2 * (case.num_tokens * work.layer_weights + work.head_weights) + 4 * pairs * work.attention_width
    return max(read_bytes / floors.bytes_per_s, case.num_seqs * products / floors.flop_per_s)


@dataclass(frozen=True, slots=True)
class Measured:
    case: str
    form: str
    step_s: float
    floor_s: float
    floors: Floors  # of the same run

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Measured":
        return cls(**{**data, "floors": Floors(**data["floors"])})

    def line(self) -> str:
        cells = (
            self.case, self.form, f"{self.step_s * 1e3:.1f}", f"{self.floor_s * 1e3:.1f}",
            f"{self.floor_s / self.step_s:.2f}", f"{self.floors.bytes_per_s / 1e9:.1f}",
            f"{self.floors.flop_per_s / 1e9:.0f}",
        )  # fmt: skip
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True)
class Profile:
    """Of whole steps of the engine, all decodes: milliseconds a step by part (medians)."""

    form: str
    num_seqs: int
    step_ms: float
    parts_ms: dict[str, float]
    share_of_all_but_loops: float

    @property
    def python_share(self) -> float:
        """Of what is not the model."""
        return sum(self.parts_ms[name] for name in PYTHON) / self.step_ms

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {ms:.2f}" for name, ms in self.parts_ms.items())
        return f"{self.form}: {self.step_ms:.1f} ms, {self.python_share:.1%} of it Python ({parts})"


def write_results(
    folder: Path, about: Mapping[str, Any], measured: Sequence[Measured], profiles: Sequence[Profile]
) -> str:
    """What earlier runs found of other cases and forms stays, and so does what was written about it. -> the page"""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "step.json"
    earlier = json.loads(file.read_text()) if file.exists() else {"measured": [], "profiles": []}
    words: list[str] = earlier.get("words", [])
    by_case = {(one.case, one.form): one for one in [*map(Measured.from_json, earlier["measured"]), *measured]}
    by_form = {one.form: one for one in [*(Profile(**one) for one in earlier["profiles"]), *profiles]}
    everything = {
        "machine": dict(about),
        "measured": [asdict(one) for one in by_case.values()],
        "profiles": [asdict(one) for one in by_form.values()],
        "words": words,
    }
    file.write_text(json.dumps(everything, indent=1) + "\n")
    text = "\n".join([as_markdown(about, list(by_case.values()), list(by_form.values())), *words])
    file.with_suffix(".md").write_text(text)
    return text


def as_markdown(about: Mapping[str, Any], measured: Sequence[Measured], profiles: Sequence[Profile]) -> str:
    lines = [
        "# A step beside its floors",
        "",
        "Of the last run: " + ", ".join(f"{name} {value}" for name, value in about.items()),
        "",
        "The model's part of a step (medians), and what it cannot be faster than: reading weights, keys and values",
        "once, at the speed of a large sum, or its products, attention's too, at the speed of torch's large one,",
        "whichever takes longer. Both are measured in each round, beside the steps. 1.00 is the floor; a step is",
        "faster where its loops multiply faster than torch does. w8a8 and w4a8 multiply integers.",
        "",
        "| step | weights | ms | floor ms | floor / step | GB/s | GFLOP/s |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(one.line() for one in measured),
        "",
    ]
    if profiles:
        lines += _profiles(profiles)
    return "\n".join(lines)


def _profiles(profiles: Sequence[Profile]) -> list[str]:
    names = list(dict.fromkeys(name for one in profiles for name in one.parts_ms))
    lines = [
        f"Where whole steps of the engine go, {profiles[0].num_seqs} sequences decoding greedily, or drawn at a",
        "temperature of 0.8 with a top-p of 0.95 (ms, medians).",
        "Python: scheduling, building the batch, sampling, commit. Not the loops: that, and what is around the loops.",
        "",
        f"| weights | step | {' | '.join(names)} | Python | not the loops |",
        "|---|---:|" + "---:|" * (len(names) + 2),
    ]
    for one in profiles:
        cells = [f"{one.parts_ms.get(name, 0):.2f}" for name in names]
        cells += [f"{one.python_share:.1%}", f"{one.share_of_all_but_loops:.1%}"]
        lines.append(f"| {one.form} | {one.step_ms:.1f} | {' | '.join(cells)} |")
    return [*lines, ""]
