"""Sampling on the device: what most requests want, all rows in one go, and then one look at the tokens.

Requests that want logprobs, or have a grammar, go through `kvasir.engine.sampler`, row by row.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvasir.engine.cuda_upload import upload
from kvasir.engine.grammar_step import Masks
from kvasir.engine.request import Request
from kvasir.engine.sampler import Drafts, sample, taken
from kvasir.engine.sampling_row import rows_of
from kvasir.engine.sampling_tensors import sampling_tensors
from kvasir.engine.step import Sampled
from kvasir.kernels.backend import is_triton
from kvasir.kernels.sample import MAX_VOCABULARY
from kvasir.kernels.sample import sample as sample_rows

# Shapes: R rows, one a position to be sampled  V vocabulary


def samples_on_device(logits: Tensor) -> bool:
    """logits [R, V]"""
    return is_triton(logits) and logits.shape[1] <= MAX_VOCABULARY


def logits_of(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """logits [R, V] -> [len(rows), V]. Indexing by a list would wait for the device."""
    return logits.index_select(0, upload([np.array(rows, np.int64)], logits.device)[0])


def sample_on_device(logits: Tensor, requests: Sequence[Request], masks: Masks, drafts: Drafts) -> list[Sampled]:
    """As `kvasir.engine.sampler.sample`, but for the rounding of probabilities. logits [R, V]"""
    proposals = [drafts.get(request.request_id, ()) for request in requests]
    ends = _ends(proposals)
    here = [i for i, request in enumerate(requests) if _is_plain(request)]
    rows = [row for i in here for row in rows_of(requests[i], proposals[i])]
    tokens: Tensor | None = None
    if rows:
        params = sampling_tensors(rows, logits.shape[1], logits.device)
        mine = logits if len(here) == len(requests) else logits_of(logits, _indices(here, proposals, ends))
        tokens = sample_rows(mine, params)  # launched, and not waited for while others are sampled
    results = _sample_others(logits, requests, proposals, ends, masks, drafts)
    chosen = iter([] if tokens is None else tokens.tolist())
    for i in here:
        results[i] = taken(requests[i], proposals[i], [next(chosen) for _ in range(1 + len(proposals[i]))])
    return [results[i] for i in range(len(requests))]


def _sample_others(
    logits: Tensor, requests: Sequence[Request], proposals: Sequence[Sequence[int]], ends: Sequence[int],
    masks: Masks, drafts: Drafts,
) -> dict[int, Sampled]:  # fmt: skip
    others = [i for i, request in enumerate(requests) if not _is_plain(request)]
    if not others:
        return {}
    sampled = sample(logits_of(logits, _indices(others, proposals, ends)), [requests[i] for i in others], masks, drafts)
    return dict(zip(others, sampled, strict=True))


def _is_plain(request: Request) -> bool:
    return request.sampling.logprobs is None and request.matcher is None


def _ends(proposals: Sequence[Sequence[int]]) -> list[int]:
    """Behind each request's last row"""
    ends, end = [], 0
    for proposed in proposals:
        end += 1 + len(proposed)
        ends.append(end)
    return ends


def _indices(of: Sequence[int], proposals: Sequence[Sequence[int]], ends: Sequence[int]) -> list[int]:
    return [row for i in of for row in range(ends[i] - 1 - len(proposals[i]), ends[i])]
