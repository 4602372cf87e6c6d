import pytest
import torch

from kvasir.kernels.linear import PackedLinear, linear_reference


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 200])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_product_is_the_plain_one(num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(100, 72, dtype=dtype), torch.randn(100, dtype=dtype) if has_bias else None
    x = torch.randn(num_tokens, 72, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 0.2}
    torch.testing.assert_close(PackedLinear(weight, bias)(x), linear_reference(x, weight, bias), **tolerance)
