"""Arrays from the host to a device. To a GPU they go in one copy, from pinned memory, and nobody waits for it.

arrays    | token ids | positions | ... |          a copy each would cost more than what it moves
pinned    |token ids|positions|...     |
                v
device    |token ids|positions|...     |           views of it are what is returned
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.kernels.block_bytes import pool_bytes

Array = NDArray[Any]

_ALIGNMENT_BYTES = 16  # kernels may ask for it
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """int64, int32 or float32, of any shape. On a CPU: the arrays' own memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return upload_in_one_copy(arrays, device)


def upload_in_one_copy(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """What `upload` does for a GPU. Pinned memory is used again only when its copy is done: torch sees to that."""
    sizes = [-(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for array in arrays]
    starts = list(accumulate(sizes, initial=0))
    host = torch.empty(max(starts[-1], _ALIGNMENT_BYTES), dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = np.frombuffer(pool_bytes(host[None]), np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
