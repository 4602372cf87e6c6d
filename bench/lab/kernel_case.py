"""One thing that `kvasir bench kernels` measures, and the shape of the model that all of them come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of an 8B model


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A kernel with its tensors, ready to run."""

    run: Callable[[], object]
    check: Callable[[], None]  # after one run; AssertionError: the result is wrong
    amount: float  # bytes that must be read and written, or operations that must be done
    beside: Callable[[], object] | None = None  # the same by other means


@dataclass(frozen=True, kw_only=True)
class Case:
    kernel: str
    shape: str
    make: Callable[[str], Prepared]  # by device
    bound: Literal["copy", "matmul"] = "copy"  # the ceiling it is held against
    wanted: float | None = None  # share of the ceiling


def close_to(actual: Tensor, expected: Tensor) -> None:
    """Of bfloat16, whose values have 8 bits, after two roundings; AssertionError"""
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)
