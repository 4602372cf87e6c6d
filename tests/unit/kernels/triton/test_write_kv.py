from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir.kernels.write_kv import write_kv
from tests.unit.kernels.triton.tolerances import assert_near

# Shapes: T tokens  H query heads  K KV heads  B tokens a block  D head dim  R rotated dimensions of a head
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NUM_LAYERS, LAYER = 3, 1


@dataclass(frozen=True, kw_only=True)
class Write:
    num_tokens: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotated: int = 64  # 0: no rotation
    interleaved: bool = False
    block: int = 16
    dtype: torch.dtype = F32


CASES = {
    "one token": Write(num_tokens=1),
    "fp16": Write(dtype=F16),
    "bf16": Write(dtype=BF16),
    "no rotation": Write(rotated=0, dtype=F16),
    "more heads than a program takes": Write(heads=14, kv_heads=4, dtype=F16),  # a border within the keys
    "keys and values end with a program": Write(heads=8, kv_heads=4),
    "head dim 80": Write(head_dim=80, rotated=80, dtype=F16),
    "head dim 96": Write(head_dim=96, rotated=96),
    "head dim 128": Write(head_dim=128, rotated=128, dtype=BF16),
    "head dim 256": Write(head_dim=256, rotated=256, dtype=F16),
    "a half is rotated": Write(rotated=32),
    "a part of 80 is rotated": Write(head_dim=80, rotated=32, dtype=F16),
    "interleaved": Write(interleaved=True),
    "interleaved, 80": Write(head_dim=80, rotated=80, interleaved=True, dtype=F16),
    "interleaved, a half": Write(rotated=32, interleaved=True, dtype=BF16),
    "blocks of 1": Write(block=1),
    "blocks of 3": Write(block=3, dtype=F16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_what_the_definition_says(case: Write, device: str) -> None:
    check(case, device)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    num_tokens=st.integers(1, 6),
    heads=st.sampled_from([(1, 1), (5, 1), (12, 3), (32, 8)]),
    dims=st.sampled_from([(64, 64), (64, 16), (80, 80), (96, 48), (128, 128), (128, 0), (256, 64)]),
    interleaved=st.booleans(),
    dtype=st.sampled_from([F16, BF16, F32]),
)
def test_any_shape(
    num_tokens: int, heads: tuple[int, int], dims: tuple[int, int], interleaved: bool, dtype: torch.dtype, device: str
) -> None:
    case = Write(
        num_tokens=num_tokens, heads=heads[0], kv_heads=heads[1], head_dim=dims[0], rotated=dims[1],
        interleaved=interleaved, dtype=dtype,
    )  # fmt: skip
    check(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (80, 32), (96, 96), (128, 128), (256, 64)])
def test_full_shapes(dtype: torch.dtype, interleaved: bool, dims: tuple[int, int], device: str) -> None:
    case = Write(
        num_tokens=32_768, heads=32, kv_heads=8, head_dim=dims[0], rotated=dims[1], interleaved=interleaved, dtype=dtype
    )
    check(case, device)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the products that are not chosen
@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_not_rotated_is_copied_bit_by_bit(interleaved: bool, device: str) -> None:
    """An infinity or a NaN stays where it is: neither the dimension it would be paired with nor another feels it."""
    qkv = torch.randn(2, 3 * 64, device=device)
    qkv[0, 2 * 64 + 3], qkv[1, 2 * 64 + 40] = torch.inf, torch.nan  # values
    qkv[0, 64 + 60] = -torch.inf  # of the key, behind the rotated part
    before = qkv.clone()
    kv_cache = torch.zeros(1, 1, 2, 1, 4, 64, device=device)
    angles = torch.rand(2, 16, device=device)
    write_kv(qkv, angles.cos(), angles.sin(), torch.tensor([2, 0], device=device), kv_cache, 0, interleaved=interleaved)
    stored = kv_cache[0, 0, :, 0, [2, 0]]  # [2, T, D]
    torch.testing.assert_close(stored[1], before[:, 128:], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(stored[0, :, 32:], before[:, 96:128], rtol=0, atol=0)
    assert stored[0, :, :32].isfinite().all()


def check(case: Write, device: str) -> None:
    generator = torch.Generator(device).manual_seed(case.num_tokens + case.head_dim)
    options = {"generator": generator, "device": device}
    heads_in_all = case.heads + 2 * case.kv_heads
    wider = torch.randn(case.num_tokens, heads_in_all * case.head_dim + 16, **options).to(case.dtype)
    qkv, original = wider[:, :-16], wider.clone()
    angles = torch.rand(case.num_tokens, case.rotated // 2, **options) * 6.28
    cos, sin = (angles.cos(), angles.sin()) if case.rotated else (None, None)
    num_blocks = case.num_tokens // case.block + 3
    shape = (num_blocks, NUM_LAYERS, 2, case.kv_heads, case.block, case.head_dim)
    kv_cache = torch.randn(shape, **options).to(case.dtype)
    cache_before = kv_cache.clone()
    slots = torch.randperm(num_blocks * case.block, **options)[: case.num_tokens]
    if case.num_tokens > 2:
        slots[1] = -1  # padding
    write_kv(qkv, cos, sin, slots, kv_cache, LAYER, interleaved=case.interleaved)

    heads = original[:, :-16].double().view(case.num_tokens, heads_in_all, case.head_dim)
    queries, keys, values = heads.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    if cos is not None and sin is not None:
        queries, keys = (rotate(x, cos.double(), sin.double(), case.interleaved) for x in (queries, keys))
    width, after_keys = case.heads * case.head_dim, (case.heads + case.kv_heads) * case.head_dim
    assert_near(qkv[:, :width], queries.flatten(1))
    assert torch.equal(wider[:, after_keys:], original[:, after_keys:])
    kept = slots >= 0
    blocks, offsets = slots[kept] // case.block, slots[kept] % case.block
    assert_near(kv_cache[blocks, LAYER, 0, :, offsets], keys[kept])
    assert torch.equal(kv_cache[blocks, LAYER, 1, :, offsets].double(), values[kept])
    kv_cache[blocks, LAYER, :, :, offsets] = cache_before[blocks, LAYER, :, :, offsets]
    assert torch.equal(kv_cache, cache_before), "something was written that is no slot of this layer"


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """[T, H, D] float64 -> the same: pairs of dimensions as complex numbers, times exp(i angle)"""
    half = cos.shape[1]
    part, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    x, y = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    turned = torch.complex(x, y) * torch.complex(cos, sin)[:, None]
    both = (turned.real, turned.imag)
    rotated = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    return torch.cat((rotated, rest), dim=-1)
