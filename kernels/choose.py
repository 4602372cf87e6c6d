"""Tokens from logits on a CPU: the best one of each row, and a draw, in one go over all rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.kernels.sample import draw_reference

# Shapes: R rows  V vocabulary

Ids = NDArray[np.int64]


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


def choose(logits: Tensor, draws: Sequence[Draw], *, may_hold_bans: bool = False) -> tuple[Ids, Ids]:
    """logits [R, V] float32 on a CPU -> best [R], the first of equals, or -1 where not all are finite; drawn [R]

    Each row by itself: what else is in the batch makes no difference to it. As the reference, but where u or top_p
    falls on an edge to about eight digits: weights of all tokens are summed in float32, a part of the row at a time.
    may_hold_bans: -inf is a token that must not come, and whoever calls has seen to it that nothing else is not finite.
    """
    from kvasir.kernels.cpu import choice, threads

    assert (logits.device.type, logits.dtype) == ("cpu", torch.float32), "the loop reads float32"
    logits = logits.contiguous()
    num_rows, vocabulary = logits.shape
    settings = np.array(draws, np.float64)
    num_parts = -(-vocabulary // choice.PART)
    sums, tops = np.empty((num_rows, num_parts), np.float64), np.empty((num_rows, num_parts), np.float32)
    best, drawn = np.full(num_rows, -1, np.int64), np.full(num_rows, -1, np.int64)
    threads.launch(
        choice.choose, num_rows, num_rows, vocabulary, logits.data_ptr(), int(may_hold_bans), settings.ctypes.data,
        num_parts, sums.ctypes.data, tops.ctypes.data, best.ctypes.data, drawn.ctypes.data,
    )  # fmt: skip
    return best, drawn


def choose_reference(logits: Tensor, draws: Sequence[Draw], *, may_hold_bans: bool = False) -> tuple[Ids, Ids]:
    best = logits.argmax(-1).numpy()
    if not may_hold_bans:
        best = np.where(logits.isfinite().all(-1), best, -1)
    drawn = best.copy()
    for r, draw in enumerate(draws):
        if best[r] >= 0 and draw.temperature > 0:
            drawn[r] = draw_reference(logits[r], *draw)
    return best, drawn
