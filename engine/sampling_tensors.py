"""What requests want of their next tokens, as the tensors of `kvasir.kernels.sample`: for sampling on the device."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir.engine.cuda_upload import Array, upload
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.sampling_row import SamplingRow
from kvasir.kernels.sample import Bias, Penalties, SamplingTensors

# Shapes: R rows, one a position to be sampled  V vocabulary

Arrays = dict[str, Array]  # by the names of the tensors that they become


def sampling_tensors(rows: Sequence[SamplingRow], vocabulary: int, device: torch.device) -> SamplingTensors:
    """[R, V] logits can then be sampled without a look from the host."""
    params = [row.params for row in rows]
    seeds = np.array([one.seed & 0xFFFFFFFFFFFFFFFF for one in params], np.uint64).view(np.int64)
    own: Arrays = {
        "temperature": np.array([one.temperature for one in params], np.float32),
        "seeds": seeds,
        "positions": np.array([len(row.prompt) + len(row.outputs) for row in rows], np.int64),
        "top_k": np.array([one.top_k for one in params], np.int32),
        "top_p": np.array([one.top_p for one in params], np.float32),
        "min_p": np.array([one.min_p for one in params], np.float32),
        **_allowed(rows, vocabulary),
    }
    bias, penalties = _bias(params), _penalties(rows)
    tensors = iter(upload([*own.values(), *bias.values(), *penalties.values()], device))
    return SamplingTensors(
        **dict(zip(own, tensors, strict=False)),
        bias=Bias(**dict(zip(bias, tensors, strict=False))) if bias else None,
        penalties=Penalties(**dict(zip(penalties, tensors, strict=False))) if penalties else None,
    )


def _bias(params: Sequence[SamplingParams]) -> Arrays:
    entries = [(row, token, value) for row, one in enumerate(params) for token, value in one.logit_bias]
    if not entries:
        return {}
    rows, ids, values = zip(*entries, strict=True)
    return {"rows": np.array(rows, np.int64), "ids": np.array(ids, np.int64), "values": np.array(values, np.float32)}


def _penalties(rows: Sequence[SamplingRow]) -> Arrays:
    """Histories travel for rows that have penalties only."""
    params = [row.params for row in rows]
    wants_prompt = [row.prompt if row.params.repetition_penalty != 1 else () for row in rows]
    wants_outputs = [
        row.outputs if len(prompt) or row.params.presence_penalty or row.params.frequency_penalty else ()
        for row, prompt in zip(rows, wants_prompt, strict=True)
    ]
    if not any(map(len, (*wants_prompt, *wants_outputs))):
        return {}

    def flat(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        row_of = np.repeat(np.arange(len(lists)), [len(ids) for ids in lists])
        return row_of, np.array([token for ids in lists for token in ids], np.int64)

    prompt_rows, prompt_ids = flat(wants_prompt)
    output_rows, output_ids = flat(wants_outputs)
    return {
        "repetition": np.array([one.repetition_penalty for one in params], np.float32),
        "presence": np.array([one.presence_penalty for one in params], np.float32),
        "frequency": np.array([one.frequency_penalty for one in params], np.float32),
        "prompt_rows": prompt_rows,
        "prompt_ids": prompt_ids,
        "output_rows": output_rows,
        "output_ids": output_ids,
    }


def _allowed(rows: Sequence[SamplingRow], vocabulary: int) -> Arrays:
    """[R, ceil(V / 32)] int32; nothing where every row may say anything"""
    masks = [row.allowed_by_all(vocabulary) for row in rows]
    if all(mask is None for mask in masks):
        return {}
    bits = np.zeros((len(rows), -(-vocabulary // 32) * 32), np.bool_)
    for row, mask in enumerate(masks):
        bits[row, :vocabulary] = True if mask is None else mask
    return {"allowed": np.packbits(bits, axis=1, bitorder="little").view("<i4")}
