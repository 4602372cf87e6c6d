"""Normalisation and gated activations, against float64; rows lie in the middle of wider ones full of NaN."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir.kernels.gelu_mul import gelu_mul, gelu_mul_reference
from kvasir.kernels.qk_norm import qk_norm, qk_norm_reference
from kvasir.kernels.rms_norm import rms_norm
from kvasir.kernels.silu_mul import silu_mul, silu_mul_reference
from tests.unit.kernels.triton.poison import poison_new_memory
from tests.unit.kernels.triton.tolerances import assert_near

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NUM_TOKENS = st.sampled_from([0, 1, 2, 5])
EPS = 1e-5
any_shape = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


def some_rows(num_rows: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    wide = torch.full((num_rows, size + 24), torch.nan, dtype=dtype, device=device)
    rows = wide[:, 8 : 8 + size]
    rows.copy_(torch.randn(num_rows, size, device=device) * 3)
    return rows


def normalised(values: Tensor, weight: Tensor) -> Tensor:
    """values [..., D], weight [D] -> float64"""
    precise = values.double()
    return precise / (precise.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def check_rms_norm(num_tokens: int, size: int, dtype: torch.dtype, has_residual: bool, device: str) -> None:
    hidden, weight = some_rows(num_tokens, size, dtype, device), torch.randn(size, dtype=dtype, device=device)
    residual = some_rows(num_tokens, size, dtype, device) if has_residual else None
    before = hidden.clone()
    total = hidden if residual is None else (hidden.double() + residual.double()).to(dtype)
    out = rms_norm(hidden, weight, EPS, residual)
    assert_near(out, normalised(total, weight))
    assert torch.equal(hidden, before)
    assert residual is None or torch.equal(residual, total), "the sum, rounded once"


@any_shape
@given(
    num_tokens=st.sampled_from([0, 1, 2, 33]), size=st.sampled_from([1, 8, 63, 64, 65, 577, 2048, 2050]),
    dtype=st.sampled_from(DTYPES), has_residual=st.booleans(),
)  # fmt: skip
@example(num_tokens=33, size=577, dtype=torch.float32, has_residual=True)
def test_rms_norm(num_tokens: int, size: int, dtype: torch.dtype, has_residual: bool, device: str) -> None:
    check_rms_norm(num_tokens, size, dtype, has_residual, device)


def test_a_row_of_zeros_stays_one(device: str) -> None:
    zeros, weight = torch.zeros(1, 64, device=device), torch.ones(64, device=device)
    assert torch.equal(rms_norm(zeros, weight, EPS), zeros)


def check_gated(num_tokens: int, size: int, dtype: torch.dtype, name: str, scale: float, device: str) -> None:
    gate_up = some_rows(num_tokens, 2 * size, dtype, device)
    gate_up.mul_(scale)
    kernel, reference = {"silu": (silu_mul, silu_mul_reference), "gelu": (gelu_mul, gelu_mul_reference)}[name]
    assert_near(kernel(gate_up), reference(gate_up.double()))


@any_shape
@given(
    num_tokens=NUM_TOKENS, size=st.sampled_from([1, 48, 1023, 1024, 1025]), dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(["silu", "gelu"]), scale=st.sampled_from([1.0, 20.0]),
)  # fmt: skip
def test_gated(num_tokens: int, size: int, dtype: torch.dtype, name: str, scale: float, device: str) -> None:
    check_gated(num_tokens, size, dtype, name, scale, device)


@pytest.mark.parametrize("kernel", [silu_mul, gelu_mul])
def test_nan_goes_through_and_large_gates_do_not_make_any(kernel: object, device: str) -> None:
    gate_up = torch.ones(1, 8, device=device)
    gate_up[0, :4] = torch.tensor([torch.nan, -80.0, 80.0, 0.0])
    out = kernel(gate_up)  # type: ignore[operator]
    assert out[0].isnan().tolist() == [True, False, False, False]
    assert_near(out[:, 1:], torch.tensor([[0.0, 80.0, 0.0]], dtype=torch.float64, device=device))


@any_shape
@given(
    num_tokens=NUM_TOKENS, heads=st.sampled_from([(1, 1), (4, 2), (14, 2), (16, 16)]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_qk_norm(num_tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str) -> None:
    num_heads, num_kv_heads = heads
    qkv = some_rows(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype, device)
    query_weight, key_weight = torch.randn(2, head_dim, device=device).to(dtype)
    before = qkv.clone().unflatten(1, (-1, head_dim))
    by_reference = qkv.clone()
    qk_norm_reference(by_reference, query_weight, key_weight, num_heads, num_kv_heads, EPS)
    qk_norm(qkv, query_weight, key_weight, num_heads, num_kv_heads, EPS)
    after = qkv.unflatten(1, (-1, head_dim))
    keys = slice(num_heads, num_heads + num_kv_heads)
    assert_near(after[:, :num_heads], normalised(before[:, :num_heads], query_weight))
    assert_near(after[:, keys], normalised(before[:, keys], key_weight))
    assert torch.equal(after[:, keys.stop :], before[:, keys.stop :]), "values are left alone"
    assert_near(qkv, by_reference.double())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [32, 32_768])
def test_full_shapes(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    check_rms_norm(num_tokens, 4096, dtype, True, device)
    check_gated(num_tokens, 14_336, dtype, "silu", 1.0, device)
    check_gated(num_tokens, 14_336, dtype, "gelu", 1.0, device)


@pytest.mark.gpu
def test_offsets_beyond_2_31(device: str) -> None:
    """The last of so many rows, alone, gives what it gives among them."""
    rows = torch.randn(2**31 // 28_672 + 2, 28_672, dtype=torch.bfloat16, device=device)
    weight = torch.ones(28_672, dtype=torch.bfloat16, device=device)
    assert torch.equal(silu_mul(rows)[-1:], silu_mul(rows[-1:]))
    assert torch.equal(rms_norm(rows, weight, EPS)[-1:], rms_norm(rows[-1:], weight, EPS))
