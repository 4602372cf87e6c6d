"""From logits to one token a row, each row with its own parameters, without waiting for the device.

    logits -> bias -> penalties -> mask -> greedy: argmax
                                        -> temperature -> top-k, top-p, min-p -> draw

Nothing is random: the draw uses one number made from (seed, position), and rows know nothing of each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.kernels.backend import is_triton

# Shapes: R rows  V vocabulary  E entries of a sparse list

MAX_VOCABULARY = 1 << 18  # of the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """What is added to single logits; no (row, id) twice."""

    rows: Tensor  # [E] int64
    ids: Tensor  # [E] int64
    values: Tensor  # [E] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Repetition: for each distinct token of prompt and output. Presence and frequency: output only."""

    repetition: Tensor  # [R] float32; 1: none
    presence: Tensor  # [R] float32; 0: none
    frequency: Tensor  # [R] float32
    prompt_rows: Tensor  # [E] int64, the row of each prompt token
    prompt_ids: Tensor  # [E] int64
    output_rows: Tensor  # [E'] int64
    output_ids: Tensor  # [E'] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """How each row wants its token, on the device of the logits. What no row asks for is None, and costs nothing."""

    temperature: Tensor  # [R] float32; 0: greedy, and what follows does not matter
    seeds: Tensor  # [R] int64, the bits of an unsigned number
    positions: Tensor  # [R] int64, of the token in prompt and output
    top_k: Tensor  # [R] int32; 0: all
    top_p: Tensor  # [R] float32, in (0, 1]
    min_p: Tensor  # [R] float32, in [0, 1]
    bias: Bias | None = None
    penalties: Penalties | None = None
    allowed: Tensor | None = None  # [R, ceil(V / 32)] int32: bit i of word w allows token 32 w + i; at least one a row


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [R, V] of any float type, left as they are -> [R] int64; -1 for a row that held NaN or an infinity

    The best has the lowest id of those with its logit. Tokens that tie at the edge of top-k or top-p all stay.
    """
    if is_triton(logits):
        from kvasir.kernels.triton import sample as kernel

        return kernel.sample(logits, params)
    return sample_reference(logits, params)


def sample_reference(logits: Tensor, params: SamplingTensors) -> Tensor:
    is_finite = logits.isfinite().all(-1)
    processed = process_reference(logits, params)
    drawn = [_draw(processed[row], params, row) for row in range(len(processed))]
    tokens = torch.tensor(drawn, dtype=torch.int64, device=logits.device)
    return torch.where(is_finite, tokens, -1)


def process_reference(logits: Tensor, params: SamplingTensors) -> Tensor:
    """[R, V] -> [R, V] float32, -inf for what is not allowed"""
    processed = add_bias(logits, params.bias)
    if params.penalties is not None:
        penalties = params.penalties
        seen, counts = tokens_seen(penalties, logits.shape)
        by = penalties.repetition[:, None]
        processed = torch.where(seen, torch.where(processed > 0, processed / by, processed * by), processed)
        processed -= penalties.presence[:, None] * (counts > 0) + penalties.frequency[:, None] * counts
    if params.allowed is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        bits = params.allowed[:, ids // 32] >> (ids % 32) & 1
        processed = torch.where(bits == 1, processed, -torch.inf)
    return processed


def add_bias(logits: Tensor, bias: Bias | None) -> Tensor:
    """-> a float32 copy"""
    biased = logits.to(torch.float32, copy=True)
    if bias is not None:
        biased[bias.rows, bias.ids] += bias.values
    return biased


def tokens_seen(penalties: Penalties, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """-> [R, V] bool: among prompt or output; [R, V] int32: how often among the output"""
    device = penalties.prompt_ids.device
    counts = torch.zeros(shape, dtype=torch.int32, device=device)
    at = penalties.output_rows * shape[1] + penalties.output_ids
    counts.view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    seen = counts > 0
    seen[penalties.prompt_rows, penalties.prompt_ids] = True
    return seen, counts


def _draw(logits: Tensor, params: SamplingTensors, row: int) -> int:
    number = uniform(int(params.seeds[row]), int(params.positions[row]))
    return draw_reference(
        logits, float(params.temperature[row]), number,
        int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]),
    )  # fmt: skip


def draw_reference(
    logits: Tensor, temperature: float, u: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """Where u in [0, 1) falls in the distribution of what is left, its tokens in ascending order. logits [V]"""
    logits = logits.double()
    if temperature == 0 or not bool(logits.max().isfinite()):
        return int(logits.argmax())
    weights = ((logits - logits.max()) / temperature).exp()
    if 0 < top_k < len(weights):
        weights = _at_least(weights, float(weights.topk(top_k).values[-1]))
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        edge = torch.searchsorted(ordered.cumsum(0), top_p * weights.sum())
        weights = _at_least(weights, float(ordered[min(int(edge), len(ordered) - 1)]))
    weights = _at_least(weights, min_p)  # the best weighs 1
    sums = weights.cumsum(0)
    index = int(torch.searchsorted(sums, u * sums[-1], right=True))
    return min(index, int(weights.nonzero()[-1]))


def _at_least(weights: Tensor, threshold: float) -> Tensor:
    return torch.where(weights >= threshold, weights, 0.0)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1): two rounds of splitmix64's finaliser, over the seed and then over the position."""
    return (_mix(_mix(seed) ^ (position * 0x9E3779B97F4A7C15)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
