"""What requests want of their next tokens, as the tensors of `kvasir.kernels.sample`: for sampling on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.engine.logits import banned_now
from kvasir.engine.sampling_params import SamplingParams
from kvasir.kernels.sample import Bias, Penalties, SamplingTensors

# Shapes: R rows, one a position to be sampled  V vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """One position: what its request wants, and what comes before it."""

    params: SamplingParams
    prompt: Sequence[int]
    outputs: Sequence[int]  # drafts before this position among them
    allowed: NDArray[np.bool_] | None = None  # [V], by the grammar; at least one


def sampling_tensors(rows: Sequence[SamplingRow], vocabulary: int, device: torch.device) -> SamplingTensors:
    """[R, V] logits can then be sampled without a look from the host."""
    params = [row.params for row in rows]
    positions = [len(row.prompt) + len(row.outputs) for row in rows]
    seeds = np.array([one.seed & 0xFFFFFFFFFFFFFFFF for one in params], np.uint64).view(np.int64)
    return SamplingTensors(
        temperature=_on(device, np.array([one.temperature for one in params], np.float32)),
        seeds=_on(device, seeds),
        positions=_on(device, np.array(positions, np.int64)),
        top_k=_on(device, np.array([one.top_k for one in params], np.int32)),
        top_p=_on(device, np.array([one.top_p for one in params], np.float32)),
        min_p=_on(device, np.array([one.min_p for one in params], np.float32)),
        bias=_bias(params, device),
        penalties=_penalties(rows, device),
        allowed=_allowed(rows, vocabulary, device),
    )


def _on(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    """A copy from pageable memory would hold up the host until the device has come to it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _bias(params: Sequence[SamplingParams], device: torch.device) -> Bias | None:
    entries = [(row, token, value) for row, one in enumerate(params) for token, value in one.logit_bias]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return Bias(
        rows=_on(device, np.array(rows, np.int64)),
        ids=_on(device, np.array(ids, np.int64)),
        values=_on(device, np.array(values, np.float32)),
    )


def _penalties(rows: Sequence[SamplingRow], device: torch.device) -> Penalties | None:
    """Histories travel for rows that have penalties only."""
    params = [row.params for row in rows]
    wants_prompt = [row.prompt if row.params.repetition_penalty != 1 else () for row in rows]
    wants_outputs = [
        row.outputs if len(prompt) or row.params.presence_penalty or row.params.frequency_penalty else ()
        for row, prompt in zip(rows, wants_prompt, strict=True)
    ]
    if not any(map(len, (*wants_prompt, *wants_outputs))):
        return None

    def flat(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        row_of = np.repeat(np.arange(len(lists)), [len(ids) for ids in lists])
        return _on(device, row_of), _on(device, np.array([token for ids in lists for token in ids], np.int64))

    prompt_rows, prompt_ids = flat(wants_prompt)
    output_rows, output_ids = flat(wants_outputs)
    return Penalties(
        repetition=_on(device, np.array([one.repetition_penalty for one in params], np.float32)),
        presence=_on(device, np.array([one.presence_penalty for one in params], np.float32)),
        frequency=_on(device, np.array([one.frequency_penalty for one in params], np.float32)),
        prompt_rows=prompt_rows,
        prompt_ids=prompt_ids,
        output_rows=output_rows,
        output_ids=output_ids,
    )


def _allowed(rows: Sequence[SamplingRow], vocabulary: int, device: torch.device) -> Tensor | None:
    """[R, ceil(V / 32)] int32; None where every row may say anything"""
    masks = [_allowed_of(row, vocabulary) for row in rows]
    if all(mask is None for mask in masks):
        return None
    bits = np.zeros((len(rows), -(-vocabulary // 32) * 32), np.bool_)
    for row, mask in enumerate(masks):
        bits[row, :vocabulary] = True if mask is None else mask
    return _on(device, np.packbits(bits, axis=1, bitorder="little").view("<i4"))


def _allowed_of(row: SamplingRow, vocabulary: int) -> NDArray[np.bool_] | None:
    """A rule that leaves nothing to say gives way to those before it: grammar, allowed ids, banned ids."""
    banned = banned_now(row.params, list(row.outputs))
    if row.allowed is None and not row.params.allowed_token_ids and not banned:
        return None
    mask = np.ones(vocabulary, np.bool_) if row.allowed is None else row.allowed[:vocabulary].copy()
    if row.params.allowed_token_ids:
        only = np.zeros_like(mask)
        only[list(row.params.allowed_token_ids)] = True
        mask = mask & only if (mask & only).any() else mask
    if banned:
        rest = mask.copy()
        rest[banned] = False
        mask = rest if rest.any() else mask
    return mask
