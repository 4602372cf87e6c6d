"""Which implementation of an operation runs.

                                  auto                triton             torch
    CUDA tensors                  Triton kernel       Triton kernel      torch reference
    CPU tensors                   compiled loops      compiled loops     compiled loops
    CPU, TRITON_INTERPRET=1       compiled loops      Triton kernel      compiled loops

Where there is no Triton, auto takes the torch reference, and so do CPU tensors of a type that has no compiled loop.
"""

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

from torch import Tensor

Backend = Literal["auto", "triton", "torch"]

_backend: Backend = "auto"


def use(name: Backend) -> None:
    """Of the whole process, from now on. RuntimeError: there is no Triton; ValueError: there is no such backend."""
    global _backend
    if name not in get_args(Backend):
        raise ValueError(f"no kernel backend {name!r}; there are {', '.join(get_args(Backend))}")
    if name == "triton" and not _has_triton():
        raise RuntimeError("the kernel backend triton was asked for, but triton is not installed")
    _backend = name


def is_triton(tensor: Tensor) -> bool:
    """Whether a Triton kernel takes a call with this tensor."""
    if tensor.is_cuda:
        return _backend != "torch" and _has_triton()
    return _backend == "triton" and is_interpreted()


def is_interpreted() -> bool:
    """Kernels run as Python. Triton reads this when it is imported: set it before, and never change it."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
