"""Weights with a scale for each output, as they are kept on a GPU; here by the torch reference, in bfloat16."""

import pytest
import torch

from kvasir.kernels.linear import PackedLinear, Quantization, quantizing


@pytest.mark.parametrize(("how", "tolerance"), [("none", 0.01), ("int8-rows", 0.02), ("fp8", 0.06)])
def test_close_to_the_weights_as_they_were(how: Quantization, tolerance: float) -> None:
    torch.manual_seed(2)
    weight, bias, x = torch.randn(24, 64).bfloat16(), torch.randn(24).bfloat16(), torch.randn(5, 64).bfloat16()
    with quantizing(how):
        linear, exact = PackedLinear(weight, bias), PackedLinear(weight, bias, is_exact=True)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < tolerance
    assert how == "none" or error > (exact(x).double() - expected).norm() / expected.norm()
