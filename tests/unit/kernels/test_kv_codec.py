"""The loops over a block's values, against their definitions; bit by bit, since every machine must make the same."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvasir.kernels.kv_codec import (
    FLOAT16_MAX,
    convert,
    convert_reference,
    dequantize,
    merge_planes,
    quantize,
    quantize_e4m3_reference,
    quantize_reference,
    split_planes,
    split_planes_reference,
)

DTYPES = ("float32", "bfloat16", "float16")
EDGES = (0.0, -0.0, 1.0, 65503.0, 65504.0, 65519.99, 65520.0, 1e30, 3e38, 2**-14, 2**-24, 2**-25, 3e-8, 1e-40)


def as_bytes(values: torch.Tensor) -> NDArray[np.uint8]:
    return values.contiguous().view(torch.uint8).numpy()


def as_values(data: NDArray[np.uint8], dtype: str) -> torch.Tensor:
    return torch.from_numpy(data).view(getattr(torch, dtype))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, but that any NaN is as good as another."""
    width = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.itemsize]
    same = (a.view(width) == b.view(width)) | (a.isnan() & b.isnan())
    return bool(same.all())


def all_16_bits(dtype: str) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(getattr(torch, dtype))


def some_float32() -> torch.Tensor:
    """Random bits, all that is on the edge of a 16-bit value, and one bit to each side of it."""
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    near = all_16_bits("float16").float().view(torch.int32)
    halfway = [near + 0x1000 + offset for offset in (-1, 0, 1)]
    edges = torch.tensor([*EDGES, *(-edge for edge in EDGES), np.inf, -np.inf, np.nan]).view(torch.int32)
    return torch.cat([bits.to(torch.int32), near, *halfway, edges]).view(torch.float32)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_converted_as_defined(dtype: str, out_dtype: str) -> None:
    values = some_float32() if dtype == "float32" else all_16_bits(dtype)
    expected = convert_reference(values, getattr(torch, out_dtype))
    out = np.empty(len(values) * expected.itemsize, np.uint8)
    convert(as_bytes(values), dtype, out, out_dtype)
    assert is_same(as_values(out, out_dtype), expected)


def test_what_is_too_large_for_float16_saturates_and_what_is_not_finite_stays() -> None:
    values = torch.tensor([65519.0, 65520.0, -1e30, 3e38, np.inf, -np.inf, np.nan])
    out = np.empty(14, np.uint8)
    convert(as_bytes(values), "float32", out, "float16")
    halves = as_values(out, "float16").tolist()
    assert halves[:6] == [FLOAT16_MAX, FLOAT16_MAX, -FLOAT16_MAX, FLOAT16_MAX, np.inf, -np.inf]
    assert np.isnan(halves[6])


@pytest.mark.parametrize("num_values", [1, 7, 64, 1001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_planes_are_split_and_merged(dtype: str, num_values: int) -> None:
    values = some_float32()[:num_values].to(getattr(torch, dtype))
    planes = np.empty((values.itemsize, num_values), np.uint8)
    split_planes(as_bytes(values), planes)
    assert torch.equal(torch.from_numpy(planes), split_planes_reference(values))
    merged = np.empty(values.nbytes, np.uint8)
    merge_planes(planes, merged)
    assert merged.tobytes() == as_bytes(values).tobytes()


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """scales [R], int8 [R, D], and what becomes of both [R, D]"""
    num_rows, row_size = values.shape
    scales, out = np.empty(4 * num_rows, np.uint8), np.empty(values.numel(), np.uint8)
    quantize(as_bytes(values).reshape(-1), row_size, scales, out)
    back = np.empty(4 * values.numel(), np.uint8)
    dequantize(scales, out, row_size, back)
    return (
        as_values(scales, "float32"),
        torch.from_numpy(out.view(np.int8)).view(num_rows, row_size),
        as_values(back, "float32").view(num_rows, row_size),
    )


def random_rows(row_size: int) -> torch.Tensor:
    """Of all magnitudes; every tenth value is exactly on the edge between two steps."""
    rng = torch.Generator().manual_seed(row_size)
    rows = torch.randn(500, row_size, generator=rng) * torch.exp2(torch.randint(-130, 127, (500, 1), generator=rng))
    rows.view(-1)[::10] = (rows.abs().amax(-1, keepdim=True) / 127 * 1.5).expand_as(rows).reshape(-1)[::10]
    return rows.clamp(-3e38, 3e38)


@pytest.mark.parametrize("row_size", [1, 3, 64, 80])
def test_int8_is_what_is_defined_and_no_worse_than_half_a_scale(row_size: int) -> None:
    values = random_rows(row_size)
    scales, steps, back = quantized(values)
    expected_scales, expected_steps = quantize_reference(values)
    assert is_same(scales, expected_scales)
    assert torch.equal(steps, expected_steps)
    assert int(steps.abs().max()) <= 127
    error = (back.double() - values.double()).abs()
    assert bool((error <= scales.double()[:, None] * (0.5 + 1e-4) + 2.0**-101).all())


def test_a_row_of_zeros_stays_one_and_a_row_with_nan_or_infinity_is_seen() -> None:
    values = torch.zeros(5, 8)
    values[1, 3], values[2, 7], values[3, 0], values[4] = np.nan, np.inf, -np.inf, 2.0
    _, _, back = quantized(values)
    assert torch.equal(back[0], torch.zeros(8))
    assert bool(back[1:4].isnan().all())
    assert torch.equal(back[4], values[4])


@pytest.mark.parametrize("row_size", [1, 3, 64, 80])
def test_fp8_is_what_is_defined_and_no_worse_than_a_16th_or_half_a_step(row_size: int) -> None:
    values = random_rows(row_size)
    values[:3] = torch.tensor([[0.0], [-1e-32], [2.0**-101]])
    values[3, 0], values[4, -1] = np.nan, -np.inf
    scales, codes = np.empty(4 * len(values), np.uint8), np.empty(values.numel(), np.uint8)
    quantize(as_bytes(values).reshape(-1), row_size, scales, codes, "e4m3")
    expected_scales, expected_codes = quantize_e4m3_reference(values)
    assert is_same(as_values(scales, "float32"), expected_scales)
    assert torch.equal(torch.from_numpy(codes).view(values.shape), expected_codes.view(torch.uint8))
    back = np.empty(4 * values.numel(), np.uint8)
    dequantize(scales, codes, row_size, back, "e4m3")
    restored = as_values(back, "float32").view(values.shape).double()
    assert bool(restored[3:5].isnan().all())
    error, steps = (restored - values.double())[5:].abs(), expected_scales.double()[5:, None]
    limit = torch.maximum(values[5:].double().abs() / 16, steps * 2**-10)
    assert bool((error <= limit * (1 + 1e-6) + 2.0**-101).all())


def test_every_e4m3_comes_back_as_torch_reads_it() -> None:
    """Subnormal ones, both zeros, NaN; and what lies between two goes to the even one."""
    codes = np.arange(256, dtype=np.uint8)
    back = np.empty(4 * 256, np.uint8)
    dequantize(as_bytes(torch.ones(1)), codes, 256, back, "e4m3")
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    assert is_same(as_values(back, "float32"), expected)
    steps = expected[:127]
    row = torch.cat((torch.tensor([448.0]), (steps[1:] + steps[:-1]) / 2, steps, -steps))
    scales, out = np.empty(4, np.uint8), np.empty(len(row), np.uint8)
    quantize(as_bytes(row), len(row), scales, out, "e4m3")
    assert as_values(scales, "float32").tolist() == [1.0]
    assert torch.equal(torch.from_numpy(out), row.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    "call",
    [
        lambda: split_planes(np.empty(8, np.uint8), np.empty((4, 1), np.uint8)),
        lambda: merge_planes(np.empty((2, 4), np.uint8), np.empty(9, np.uint8)),
        lambda: convert(np.empty(8, np.uint8), "float32", np.empty(5, np.uint8), "float16"),
        lambda: convert(np.empty(9, np.uint8)[1:], "float32", np.empty(4, np.uint8), "float16"),
        lambda: convert(np.empty(16, np.uint8)[::2], "float32", np.empty(4, np.uint8), "float16"),
        lambda: quantize(np.empty(32, np.uint8), 4, np.empty(4, np.uint8), np.empty(8, np.uint8)),
        lambda: dequantize(np.empty(8, np.uint8), np.empty(8, np.uint8), 4, np.empty(31, np.uint8)),
    ],
)
def test_buffers_that_do_not_fit_are_refused_before_a_loop_runs_over_their_ends(call: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        call()
