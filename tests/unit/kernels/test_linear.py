import pytest
import torch

from kvasir.kernels.linear import PackedLinear, Quantization, linear_reference, quantizing
from kvasir.kernels.quantized import GroupedWeight, joined, quantize

ROWS = [*range(1, 27), 33, 63, 64, 71, 391]  # the last three in blocks of rows
ODD_SHAPES = [(1, 1), (31, 5), (33, 64), (100, 72), (64, 97), (1030, 40)]  # outputs, inputs


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """Whatever ran before: of very many numbers, a few sums come close to the tolerance."""
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written stays NaN."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, *shape: like.new_full(shape, torch.nan))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), ODD_SHAPES)
def test_product_is_the_plain_one_for_any_number_of_rows(num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs) if has_bias else None
    linear = PackedLinear(weight, bias)
    for num_tokens in ROWS:
        x = torch.randn(num_tokens, num_inputs)
        torch.testing.assert_close(linear(x), linear_reference(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["fp16", "int8", "int4"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), ODD_SHAPES)
def test_quantized_product_is_that_of_the_dequantized_weight(
    num_outputs: int, num_inputs: int, how: Quantization
) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    with quantizing(how):
        linear = PackedLinear(weight, bias)
    seen = weight.half().float() if how == "fp16" else quantize(weight, int(how.removeprefix("int"))).dequantized()
    for num_tokens in ROWS:
        x = torch.randn(num_tokens, num_inputs)
        torch.testing.assert_close(linear(x), linear_reference(x, seen, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group_size", [16, 32, 128])
@pytest.mark.parametrize("num_inputs", [128, 256, 200])
def test_groups_of_any_size(group_size: int, num_inputs: int) -> None:
    weight = quantize(torch.randn(40, num_inputs), 4, group_size)
    for num_tokens in (9, 30, 71):  # a tile; some, part by part; blocks
        x = torch.randn(num_tokens, num_inputs)
        seen = linear_reference(x, weight.dequantized())
        torch.testing.assert_close(PackedLinear(weight)(x), seen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("how", "fewest"), [("none", 3), ("fp16", 3), ("int8", 13), ("int4", 13)])
@pytest.mark.parametrize("num_inputs", [64, 1700])  # the second in parts and in slabs
def test_a_row_has_the_same_bits_among_few_rows_and_many(how: Quantization, fewest: int, num_inputs: int) -> None:
    """Not so one row and two, which have several sums for each output, and one tile of rows, whose sums are scaled."""
    weight, bias, x = torch.randn(100, num_inputs), torch.randn(100), torch.randn(200, num_inputs)
    with quantizing(how):
        linear = PackedLinear(weight, bias)
    together = linear(x)
    for num_tokens in (fewest, 5 + fewest, 25, 40, 63, 64, 71):
        assert torch.equal(linear(x[:num_tokens]), together[:num_tokens]), num_tokens


def test_many_outputs_and_inputs() -> None:
    weight = torch.randn(4128, 1536)
    linear = PackedLinear(weight)
    for num_tokens in (1, 17, 100, 200):
        x = torch.randn(num_tokens, 1536)
        torch.testing.assert_close(linear(x), linear_reference(x, weight), rtol=1e-4, atol=1e-3)


def test_blocks_of_whole_tiles_that_leave_the_last_one_nothing() -> None:
    weight, x = torch.randn(33, 1536), torch.randn(5100, 1536)  # 51 blocks of at most 100 rows, which become 102
    torch.testing.assert_close(PackedLinear(weight)(x), linear_reference(x, weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("how", ["none", "fp16", "int8", "int4"])
def test_more_inputs_than_stay_in_the_cache(how: Quantization) -> None:
    weight, bias, x = torch.randn(100, 3200), torch.randn(100), torch.randn(71, 3200)
    with quantizing(how):
        linear = PackedLinear(weight, bias)
    seen = {"none": weight, "fp16": weight.half().float()}.get(how)
    if seen is None:
        seen = quantize(weight, int(how.removeprefix("int"))).dequantized()
    torch.testing.assert_close(linear(x), linear_reference(x, seen, bias), rtol=1e-4, atol=1e-3)


def test_other_dtypes_are_plain_products() -> None:
    weight, x = torch.randn(100, 72, dtype=torch.bfloat16), torch.randn(3, 72, dtype=torch.bfloat16)
    torch.testing.assert_close(PackedLinear(weight)(x), linear_reference(x, weight), rtol=2e-2, atol=0.2)


def test_nan_comes_through_in_its_own_row_alone() -> None:
    x = torch.randn(14, 64)
    x[5, 3] = torch.nan
    is_nan = PackedLinear(torch.randn(70, 64))(x).isnan()
    assert is_nan[5].all()
    assert not is_nan[[t for t in range(14) if t != 5]].any()


# Half a step, and what scales in float16 add to it: up to 2 ** -11 of the step.
@pytest.mark.parametrize(("bits", "most"), [(8, (1 + 2**-10) / 254), (4, 1 / 28)])
def test_no_weight_is_further_off_than_half_a_step(bits: int, most: float) -> None:
    weight = torch.randn(64, 96)
    groups = weight.view(64, 3, 32)
    span = groups.abs().amax(-1) if bits == 8 else groups.amax(-1) - groups.amin(-1)
    off = (quantize(weight, bits).dequantized() - weight).abs().view(64, 3, 32).amax(-1)
    assert float((off / span).max()) < most


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_nothing_stay_nothing(bits: int) -> None:
    assert torch.equal(quantize(torch.zeros(3, 40), bits).dequantized(), torch.zeros(3, 40))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("far", [7.0, -7.0, 300.0])
def test_groups_far_from_0_stay_there(far: float, bits: int) -> None:
    """All the same, or next to it; a group may be a single input, as the last of these rows is."""
    for spread in (0.0, 1e-3):
        weight = far + spread * torch.rand(3, 33)
        torch.testing.assert_close(quantize(weight, bits).dequantized(), weight, rtol=1e-2, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(bits: int, bad: float) -> None:
    weight = torch.randn(3, 40)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, bits)


def test_fp16_refuses_what_it_cannot_hold() -> None:
    with quantizing("fp16"), pytest.raises(ValueError, match="too large"):
        PackedLinear(torch.full((2, 2), 1e6))


def test_rows_are_cut_and_joined() -> None:
    weight = quantize(torch.randn(10, 64), 4)
    again = joined([weight[0:3], weight[3:10]])
    assert torch.equal(again.dequantized(), weight.dequantized())
    with pytest.raises(ValueError, match="different groups"):
        joined([weight, quantize(torch.randn(10, 64), 8)])


def test_what_is_exact_is_not_quantized() -> None:
    weight, x = torch.randn(8, 64), torch.randn(2, 64)
    with quantizing("int4"):
        linear = PackedLinear(weight, is_exact=True)
    torch.testing.assert_close(linear(x), linear_reference(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("how", "of_head"), [("int4", "int8"), ("w4a8_int8", "w8a8_int8"), ("fp16", "fp16")])
def test_what_gives_logits_has_no_less_than_8_bits(how: Quantization, of_head: Quantization) -> None:
    weight, x = torch.randn(8, 64), torch.randn(2, 64)
    with quantizing(how):
        head = PackedLinear(weight, is_head=True)
    with quantizing(of_head):
        assert torch.equal(head(x), PackedLinear(weight)(x))


def test_a_grouped_weight_knows_its_shape() -> None:
    weight: GroupedWeight = quantize(torch.randn(10, 40), 8)
    assert weight.shape == (10, 40)
    assert weight.scales.shape == (10, 2)
