"""Tokens from logits on a CPU: the best one of each row, and a draw, in one go over all rows."""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.kernels.sample import draw_reference

# Shapes: R rows  V vocabulary

Ids = NDArray[np.int64]
_NOTHING: Mapping[int, int] = MappingProxyType({})


class Draw(NamedTuple):
    """How a row wants its token: where u falls in the distribution of what is left, its tokens in ascending order.

    The best `top_k` are left; of them, the best that come to `top_p` of their weight; of them, those that weigh at
    least `min_p` of the best. Tokens that tie at an edge all stay.
    """

    temperature: float = 0.0  # 0: the best token, whatever else is said
    u: float = 0.0  # in [0, 1)
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0


class Change(NamedTuple):
    """What is done to a row of logits before its token is chosen, in this order.

    Each bias is added. Of the tokens `seen`, a positive logit is divided by `repetition`, any other multiplied by it;
    those that were said lose `presence`, and `frequency` for each time. What is not `allowed` must not come.
    """

    bias: Sequence[tuple[int, float]] = ()  # no token twice
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen: Mapping[int, int] = _NOTHING  # token -> how often it was said; 0: not at all, and yet it was seen
    allowed: NDArray[np.bool_] | None = None  # [V]; at least one


def choose(
    logits: Tensor, draws: Sequence[Draw], changes: Mapping[int, Change] = MappingProxyType({})
) -> tuple[Ids, Ids]:
    """logits [R, V] float32, left as they are; changes by row -> best [R], the first of equals; drawn [R]

    -1 in both where not all logits are finite. Each row by itself: what else is in the batch makes no difference to it.
    """
    if logits.device.type != "cpu":
        return choose_reference(logits, draws, changes)
    from kvasir.kernels.cpu import choice, threads
    from kvasir.kernels.cpu.token_weights import PART

    assert logits.dtype == torch.float32, "the loop reads float32"
    logits = logits.contiguous()
    num_rows, vocabulary = logits.shape
    settings, spans, tokens, amounts = _as_arrays(draws, changes)
    assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocabulary, "a token that is none"
    masks = [change.allowed for change in changes.values() if change.allowed is not None]
    assert all(mask.flags.c_contiguous and len(mask) == vocabulary for mask in masks), "a mask of another vocabulary"
    num_parts = -(-vocabulary // PART)
    sums, tops = np.empty((num_rows, num_parts), np.float64), np.empty((num_rows, num_parts), np.float32)
    best, drawn = np.empty(num_rows, np.int64), np.empty(num_rows, np.int64)
    threads.launch(
        choice.choose, num_rows, num_rows, vocabulary, logits.data_ptr(), settings.ctypes.data, spans.ctypes.data,
        len(tokens), tokens.ctypes.data, amounts.ctypes.data, num_parts, sums.ctypes.data, tops.ctypes.data,
        best.ctypes.data, drawn.ctypes.data,
    )  # fmt: skip
    return best, drawn


def _as_arrays(
    draws: Sequence[Draw], changes: Mapping[int, Change]
) -> tuple[NDArray[np.float64], Ids, Ids, NDArray[np.float64]]:
    """For the loop: settings [R, 8], spans [R, 4], and tokens [E] and amounts [E] of all changes, one after another."""
    settings, spans = np.zeros((len(draws), 8), np.float64), np.zeros((len(draws), 4), np.int64)
    settings[:, :5] = draws
    tokens: list[int] = []
    amounts: list[float] = []
    for row, change in changes.items():
        settings[row, 5:] = change.repetition, change.presence, change.frequency
        first, num_biases = len(tokens), len(change.bias)
        tokens += chain((token for token, _ in change.bias), change.seen)
        amounts += chain((bias for _, bias in change.bias), change.seen.values())
        mask = 0 if change.allowed is None else change.allowed.ctypes.data
        spans[row] = first, first + num_biases, len(tokens), mask
    return settings, spans, np.array(tokens, np.int64), np.array(amounts, np.float64)


def choose_reference(
    logits: Tensor, draws: Sequence[Draw], changes: Mapping[int, Change] = MappingProxyType({})
) -> tuple[Ids, Ids]:
    """On any device, which is waited for."""
    finite = logits.isfinite().all(-1)
    if changes:
        logits = torch.stack([change_reference(row, changes.get(r, Change())) for r, row in enumerate(logits)])
    best = torch.where(finite, logits.argmax(-1), -1).cpu().numpy()
    drawn = best.copy()
    for r, draw in enumerate(draws):
        if best[r] >= 0 and draw.temperature > 0:
            drawn[r] = draw_reference(logits[r], *draw)
    return best, drawn


def change_reference(logits: Tensor, change: Change) -> Tensor:
    """[V] -> [V], a copy; -inf for what must not come"""
    logits = logits.clone()
    if change.bias:
        tokens, biases = zip(*change.bias, strict=True)
        logits[list(tokens)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if change.seen:
        seen = list(change.seen)
        counts = torch.tensor(list(change.seen.values()), dtype=torch.float64, device=logits.device)
        old = logits[seen].double()
        new = torch.where(old > 0, old / change.repetition, old * change.repetition)
        new -= change.presence * (counts > 0) + change.frequency * counts
        logits[seen] = new.to(logits.dtype)
    if change.allowed is not None:
        logits.masked_fill_(~torch.from_numpy(change.allowed).to(logits.device), -torch.inf)
    return logits
