"""Tensors on a CPU as arrays."""

from typing import Any

from numpy.typing import NDArray
from torch import Tensor


def array_of(tensor: Tensor) -> NDArray[Any]:
    """In the same memory."""
    array: NDArray[Any] = tensor.numpy()
    return array
