"""Kernels are interpreted on the CPU (the default: tests/conftest.py), or compiled, with TRITON_INTERPRET=0 and a GPU.

make test        every case in small shapes, interpreted
make test-gpu    the same compiled, and those marked `gpu`: full shapes
"""

from collections.abc import Iterator

import pytest
import torch
from triton import knobs

from kvasir.kernels import backend


@pytest.fixture(autouse=True)
def triton_backend() -> Iterator[None]:
    assert knobs.runtime.interpret == backend.is_interpreted(), "triton was imported before TRITON_INTERPRET was set"
    backend.use("triton")
    yield
    backend.use("auto")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a test lie."""
    if backend.is_interpreted():
        if request.node.get_closest_marker("gpu"):
            pytest.skip("too large for the interpreter: make test-gpu")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("compiled kernels want a CUDA GPU, and there is none")
    return "cuda"
