"""How far a kernel's result may be from the same in float64, for inputs of about 1.

           machine epsilon   rtol   atol      what it covers
float32    1.2e-7            1e-5   1e-5      sums in another order, exp2
float16    9.8e-4            2e-3   1e-3      the result is rounded once (half an epsilon); compiled kernels also
bfloat16   7.8e-3            2e-2   1e-2      round the weights before they multiply values
"""

import torch
from torch import Tensor

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """actual of a kernel's type, expected float64; NaN, which marks what was not written, is near nothing."""
    assert expected.dtype == torch.float64
    torch.testing.assert_close(actual.double(), expected, **TOLERANCES[actual.dtype])
