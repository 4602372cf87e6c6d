"""Products with weights of 8 bits, against the product in float64 with the weight made whole."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvasir.kernels.quantized import quantize
from kvasir.kernels.quantized_linear import quantize_weight, quantized_linear, quantized_linear_reference
from tests.unit.kernels.triton.poison import poison_new_memory
from tests.unit.kernels.triton.tolerances import assert_near

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WEIGHTS = [torch.int8, torch.float8_e4m3fn]
any_shape = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def check(
    num_tokens: int, num_inputs: int, num_outputs: int, group_size: int | None, dtype: torch.dtype,
    weight_dtype: torch.dtype, has_bias: bool, device: str,
) -> None:  # fmt: skip
    weight, scales = quantize_weight(
        torch.randn(num_outputs, num_inputs, device=device) / num_inputs**0.5, weight_dtype, group_size
    )
    wide = torch.full((num_tokens, num_inputs + 16), torch.nan, dtype=dtype, device=device)
    x = wide[:, 8 : 8 + num_inputs]
    x.copy_(torch.randn(num_tokens, num_inputs, device=device))
    bias = torch.randn(num_outputs, device=device).to(dtype) if has_bias else None
    out = quantized_linear(x, weight, scales, bias)
    whole = (weight.double().unflatten(1, (scales.shape[1], -1)) * scales.double()[:, :, None]).flatten(1)
    expected = x.double() @ whole.T
    assert_near(out, expected if bias is None else expected + bias.double())


@any_shape
@given(
    num_tokens=st.sampled_from([0, 1, 15, 16, 17, 65]),
    inputs=st.sampled_from([(16, None), (63, None), (300, None), (96, 32), (256, 128), (96, 48)]),
    num_outputs=st.sampled_from([1, 31, 32, 33, 130]), dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(WEIGHTS), has_bias=st.booleans(),
)  # fmt: skip
@example(  # several tiles of tokens, of outputs, of inputs
    num_tokens=130, inputs=(96, 32), num_outputs=130, dtype=torch.float32, weight_dtype=torch.int8, has_bias=True
)
def test_any_shape(
    num_tokens: int, inputs: tuple[int, int | None], num_outputs: int, dtype: torch.dtype, weight_dtype: torch.dtype,
    has_bias: bool, device: str,
) -> None:  # fmt: skip
    check(num_tokens, inputs[0], num_outputs, inputs[1], dtype, weight_dtype, has_bias, device)


def test_every_e4m3_is_itself(device: str) -> None:
    """All values, subnormal ones and both zeros, through a product with 1."""
    bits = torch.arange(256, dtype=torch.uint8)
    weight = bits[(bits & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[:, None].repeat(1, 16).to(device)
    x = torch.zeros(1, 16, device=device)
    x[0, 0] = 1
    out = quantized_linear(x, weight, torch.ones(len(weight), 1, device=device))
    assert torch.equal(out[0], weight[:, 0].float())


def test_groups_as_the_cpu_keeps_them(device: str) -> None:
    """Codes and float16 scales of `kvasir.kernels.quantized` go in as they are."""
    grouped = quantize(torch.randn(40, 96), bits=8)
    x = torch.randn(3, 96)
    out = quantized_linear(x.to(device), grouped.codes.to(device), grouped.scales.to(device))
    assert_near(out.cpu(), x.double() @ grouped.dequantized().double().T)


@pytest.mark.parametrize("weight_dtype", WEIGHTS)
def test_a_quantized_weight_is_near_the_weight(weight_dtype: torch.dtype) -> None:
    weight = torch.randn(20, 64)
    weight[3] = 0
    quantized, scales = quantize_weight(weight, weight_dtype, 32)
    whole = quantized_linear_reference(torch.eye(64), quantized, scales).T
    steps = scales.repeat_interleave(32, dim=1)
    limit = steps / 2 if weight_dtype == torch.int8 else torch.maximum(weight.abs() / 16, steps * 2**-10)
    assert bool(((whole - weight).abs() <= limit * (1 + 1e-5)).all())


def test_shapes_that_do_not_fit_are_refused() -> None:
    weight, scales = quantize_weight(torch.randn(4, 64), torch.int8)
    with pytest.raises(ValueError, match="weight"):
        quantized_linear(torch.randn(1, 32), weight, scales)
    with pytest.raises(ValueError, match="scales"):
        quantized_linear(torch.randn(1, 64), weight, torch.ones(4, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", WEIGHTS)
@pytest.mark.parametrize("group_size", [None, 128, 32])
def test_full_shapes(weight_dtype: torch.dtype, group_size: int | None, dtype: torch.dtype, device: str) -> None:
    for num_tokens in (1, 32, 64, 2000):
        check(num_tokens, 4096, 6144, group_size, dtype, weight_dtype, True, device)
