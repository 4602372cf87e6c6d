"""Loops over rows against their references."""

import pytest
import torch

from kvasir.kernels.gelu_mul import gelu_mul, gelu_mul_reference
from kvasir.kernels.kv_rows import read_rows
from kvasir.kernels.rms_norm import rms_norm, rms_norm_reference
from kvasir.kernels.silu_mul import silu_mul, silu_mul_reference
from kvasir.kernels.write_kv import write_kv, write_kv_reference
from tests.unit.kernels.paged import in_dtype

NUM_TOKENS = [1, 16, 17, 100]


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("size", [8, 576, 577])
def test_rms_norm(num_tokens: int, size: int) -> None:
    hidden, weight = torch.randn(num_tokens, size) * 3, torch.randn(size)
    torch.testing.assert_close(
        rms_norm(hidden, weight, 1e-5), rms_norm_reference(hidden, weight, 1e-5), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rms_norm_adds_to_the_residual_first(num_tokens: int) -> None:
    hidden, residual, weight = torch.randn(num_tokens, 64), torch.randn(num_tokens, 64), torch.randn(64)
    expected_residual = residual.clone()
    expected = rms_norm_reference(hidden.clone(), weight, 1e-6, expected_residual)
    out = rms_norm(hidden, weight, 1e-6, residual)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_silu_mul(num_tokens: int, scale: float) -> None:
    gate_up = torch.randn(num_tokens, 2 * 48) * scale
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_gelu_mul(num_tokens: int, scale: float) -> None:
    gate_up = torch.randn(num_tokens, 2 * 48) * scale
    exact = gelu_mul_reference(gate_up.double()).float()  # 1 + tanh(x) cancels for x < 0, in float32 visibly
    torch.testing.assert_close(gelu_mul(gate_up), exact, rtol=1e-5, atol=1e-6)


def test_gated_activations_let_nan_through() -> None:
    gate_up = torch.zeros(1, 8)
    gate_up[0, 1] = torch.nan
    for gated in (silu_mul, gelu_mul):
        assert gated(gate_up)[0].isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("rotated", [1, 0.5, 0])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(9, 3, 64, 16), (2, 2, 8, 3)])
def test_write_kv(num_tokens: int, rotated: float, heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(num_tokens, int(head_dim * rotated) // 2) * 6
    cos, sin = (angles.cos(), angles.sin()) if rotated else (None, None)
    kv_cache = torch.randn(num_tokens // block + 3, 2, 2, kv_heads, block, head_dim)
    slots = torch.randperm(kv_cache.shape[0] * block)[:num_tokens]
    slots[num_tokens // 2] = -1
    expected_qkv, expected_cache = qkv.clone(), kv_cache.clone()
    write_kv_reference(expected_qkv, cos, sin, slots, expected_cache, 1)
    write_kv(qkv, cos, sin, slots, kv_cache, 1)
    torch.testing.assert_close(qkv, expected_qkv, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kv_cache, expected_cache, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(9, 3, 64, 16), (2, 2, 8, 3), (1, 1, 20, 1)])
def test_write_kv_in_fewer_bytes(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block: int) -> None:
    """Bit by bit; rows of zeros and of what is not finite, or too large, included. Other places stay as they are."""
    num_tokens = 37
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim)
    qkv[3] = 0
    for token, value in ((5, torch.nan), (6, torch.inf), (7, 1e6), (8, 1e-40), (9, -7e4)):
        qkv[token, -3] = value
    kv_cache = in_dtype(torch.randn(num_tokens // block + 3, 2, 2, kv_heads, block, head_dim), dtype)
    slots = torch.randperm(kv_cache.shape[0] * block)[:num_tokens]
    slots[11] = -1
    expected, before = kv_cache.clone(), kv_cache.clone()
    write_kv_reference(qkv.clone(), None, None, slots, expected, 1)
    write_kv(qkv, None, None, slots, kv_cache, 1)
    assert torch.equal(kv_cache.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(kv_cache[:, 0].view(torch.uint8), before[:, 0].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_what_is_written_in_fewer_bytes_is_rotated(dtype: torch.dtype) -> None:
    qkv, angles = torch.randn(5, 3 * 16), torch.rand(5, 8) * 6
    slots = torch.tensor([4, 0, 7, 2, 9])
    exact, kv_cache = torch.zeros(3, 1, 2, 1, 4, 16), in_dtype(torch.zeros(3, 1, 2, 1, 4, 16), dtype)
    write_kv_reference(qkv.clone(), angles.cos(), angles.sin(), slots, exact, 0)
    write_kv(qkv, angles.cos(), angles.sin(), slots, kv_cache, 0)
    largest = exact.abs().amax(-1, keepdim=True)
    step = largest / 127 if dtype == torch.int8 else largest * 2**-10
    assert bool(((read_rows(kv_cache, torch.float32) - exact).abs() <= 0.51 * step + 1e-7).all())


def test_write_kv_without_rotation_copies_exactly() -> None:
    """Spelled out by hand, since the reference is code too: token 1 of 2, block size 4, slot 6 = block 1, offset 2."""
    qkv = torch.arange(2 * 3 * 2, dtype=torch.float32).view(2, 6)  # one query, key, value head of 2 dimensions
    kv_cache = torch.zeros(2, 1, 2, 1, 4, 2)
    write_kv(qkv, None, None, torch.tensor([0, 6]), kv_cache, 0)
    assert kv_cache[1, 0, 0, 0, 2].tolist() == [8, 9]
    assert kv_cache[1, 0, 1, 0, 2].tolist() == [10, 11]
    assert int((kv_cache != 0).sum()) == 8
