"""Tokens from logits on a CPU: the best one of each row, and a draw, in one go over all rows."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Shapes: R rows  V vocabulary

Ids = NDArray[np.int64]

_LOG2_E = math.log2(math.e)
_MOST = 1e30  # of what logits are multiplied by: a float32, with room for the product


def choose(logits: Tensor, temperatures: Sequence[float], us: Sequence[float]) -> tuple[Ids, Ids]:
    """logits [R, V] float32 on a CPU -> best [R], the first of equals, or -1 where not all are finite; drawn [R]

    Drawn is where u in [0, 1) falls in the distribution at the row's temperature, its tokens in ascending order; the
    best one where the temperature is 0. Each row by itself: what else is in the batch makes no difference to it.
    """
    from kvasir.kernels.cpu import choice, threads

    assert (logits.device.type, logits.dtype) == ("cpu", torch.float32), "the loop reads float32"
    logits = logits.contiguous()
    num_rows, vocabulary = logits.shape
    scales = np.array([min(_LOG2_E / one, _MOST) if one > 0 else 0 for one in temperatures], np.float32)
    numbers = np.array(us, np.float64)
    sums = np.empty((num_rows, -(-vocabulary // choice.PART)), np.float64)
    best, drawn = np.full(num_rows, -1, np.int64), np.full(num_rows, -1, np.int64)
    threads.launch(
        choice.choose, num_rows, num_rows, vocabulary, logits.data_ptr(), scales.ctypes.data, numbers.ctypes.data,
        sums.shape[1], sums.ctypes.data, best.ctypes.data, drawn.ctypes.data,
    )  # fmt: skip
    return best, drawn


def choose_reference(logits: Tensor, temperatures: Sequence[float], us: Sequence[float]) -> tuple[Ids, Ids]:
    best = np.where(logits.isfinite().all(-1), logits.argmax(-1), -1)
    drawn = best.copy()
    for r, (temperature, u) in enumerate(zip(temperatures, us, strict=True)):
        if best[r] >= 0 and temperature > 0:
            sums = (logits[r].double() / temperature).softmax(-1).cumsum(-1)
            drawn[r] = min(int(torch.searchsorted(sums, u * float(sums[-1]), right=True)), logits.shape[1] - 1)
    return best, drawn
