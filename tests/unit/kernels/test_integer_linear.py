"""Products of quantized activations and weights: what they are, and that they are the same to the last bit."""

import hashlib
import os
import platform
import subprocess
import sys

import pytest
import torch

from kvasir.kernels.cpu import panel_tile
from kvasir.kernels.cpu.integer_panels import pack_integers
from kvasir.kernels.cpu.recording import Buffers, Recording, record
from kvasir.kernels.integer_linear import integer_linear_reference
from kvasir.kernels.kv_codec import quantize_reference
from kvasir.kernels.linear import PackedLinear, Quantization, linear_reference, quantizing
from kvasir.kernels.quantized import GroupedWeight, quantize

ROWS = [*range(1, 14), 17, 25, 33, 127, 128, 391]  # the last ones in blocks of rows
ODD_SHAPES = [(1, 1), (31, 5), (33, 64), (100, 72), (64, 97), (1030, 40), (40, 700)]  # outputs, inputs
WAYS: tuple[tuple[Quantization, int], ...] = (("w8a8_int8", 8), ("w4a8_int8", 4))


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    torch.manual_seed(1)


def product(weight: GroupedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), weight.shape[0] + 1), torch.nan)  # whoever writes behind the last row is seen
    flat = out.view(-1)[: len(x) * weight.shape[0]].view(len(x), -1)
    pack_integers(weight).multiply(x, bias, flat)
    assert out.view(-1)[flat.numel() :].isnan().all()
    return flat


def values_of_all_sizes(num_tokens: int, num_inputs: int) -> torch.Tensor:
    sizes = 10 ** torch.empty(num_tokens, num_inputs).uniform_(-3, 3)
    return torch.randn(num_tokens, num_inputs) * sizes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), ODD_SHAPES)
def test_every_bit_is_that_of_the_reference(num_outputs: int, num_inputs: int, bits: int) -> None:
    weight = quantize(torch.randn(num_outputs, num_inputs), bits)
    for num_tokens in ROWS:
        bias = torch.randn(num_outputs) if num_tokens % 2 else None
        x = values_of_all_sizes(num_tokens, num_inputs)
        assert torch.equal(product(weight, x, bias), integer_linear_reference(x, weight, bias)), num_tokens


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), ODD_SHAPES)
def test_the_reference_is_the_product_of_what_is_left_of_both(num_outputs: int, num_inputs: int, bits: int) -> None:
    weight, x = quantize(torch.randn(num_outputs, num_inputs), bits), torch.randn(50, num_inputs)
    groups = torch.nn.functional.pad(x, (0, -num_inputs % 32)).view(-1, 32)
    scales, codes = quantize_reference(groups)
    left = (codes * scales[:, None]).view(50, -1)[:, :num_inputs]
    assert float(((left - x).abs() / x.abs().amax()).max()) < 1 / 254
    expected = linear_reference(left.double(), weight.dequantized().double()).float()
    torch.testing.assert_close(integer_linear_reference(x, weight), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_see_what_else_is_in_the_batch(bits: int) -> None:
    weight, x = quantize(torch.randn(130, 200), bits), values_of_all_sizes(300, 200)
    together = product(weight, x)
    for first, count in ((0, 1), (7, 1), (299, 1), (3, 2), (40, 12), (100, 128), (5, 290)):
        assert torch.equal(product(weight, x[first : first + count].contiguous()), together[first : first + count])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_in_its_own_row_alone(bits: int, bad: float) -> None:
    weight, x = quantize(torch.randn(70, 64), bits), torch.randn(14, 64)
    x[5, 35] = bad
    is_nan = product(weight, x).isnan()
    assert is_nan[5].all()
    assert not is_nan[[t for t in range(14) if t != 5]].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_ends_of_the_range(bits: int) -> None:
    """The largest sums there can be, and values that are taken for zero."""
    weight = quantize(torch.randn(40, 96).sign(), bits)
    x = torch.stack([weight.dequantized()[3], torch.full((96,), -1.0), torch.full((96,), 2.0**-102), torch.zeros(96)])
    out = product(weight, x)
    assert torch.equal(out, integer_linear_reference(x, weight))
    assert abs(float(out[0, 3]) - 96) < 0.1
    assert not out[2:].any()


@pytest.mark.parametrize(("how", "bits"), WAYS)
def test_a_layer_of_a_model_is_this_product(how: Quantization, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(100, 72), torch.randn(100), torch.randn(9, 72)
    expected = integer_linear_reference(x, quantize(weight, bits), bias)
    with quantizing(how):
        assert torch.equal(PackedLinear(weight, bias)(x), expected)
        monkeypatch.setattr(panel_tile, "CONVERTS_FLOAT16", False)
        assert torch.equal(PackedLinear(weight, bias)(x), expected), "where loops cannot read the scales"


@pytest.mark.parametrize(("how", "bits"), WAYS)
def test_it_can_be_recorded_for_any_number_of_rows(how: Quantization, bits: int) -> None:
    weight, x, buffers, traces = torch.randn(100, 72), torch.randn(20, 72), Buffers(), []
    with quantizing(how):
        linear = PackedLinear(weight)
    for num_rows in (19, 20):
        out = None  # so that its memory is free for the next
        with record(buffers, num_rows, 20) as steps:
            out = linear(x[:num_rows])
        traces.append(steps)
    recording = Recording(traces[1], with_one_less=traces[0])
    assert out is not None
    for num_rows in (20, 1, 13):
        x.normal_()
        recording.run(num_rows)
        assert torch.equal(out[:num_rows], integer_linear_reference(x[:num_rows], quantize(weight, bits)))


DIGEST = """
from kvasir.kernels.cpu.integer_block import STEP
from tests.unit.kernels.test_integer_linear import digest_of_products
print(STEP, digest_of_products())
"""


def digest_of_products() -> str:
    torch.manual_seed(2)
    digest = hashlib.sha256()
    for bits in (8, 4):
        weight = quantize(torch.randn(40, 100), bits)
        for num_tokens in (1, 7, 130):
            x = values_of_all_sizes(num_tokens, 100)
            out = product(weight, x, torch.randn(40))
            assert torch.isfinite(out).all()
            digest.update(out.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="features of an x86 CPU")
@pytest.mark.parametrize("features", ["+avx2,+fma,+f16c", pytest.param("+sse4.2,+f16c", marks=pytest.mark.full)])
def test_a_lesser_cpu_has_the_same_bits(features: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, timeout=400, check=True
    )
    assert done.stdout == f"2 {digest_of_products()}\n"
