"""Packed blocks against the CPU's codec, byte by byte, and against their definition."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvasir.engine.blocks import KVLayout
from kvasir.kernels import kv_codec
from kvasir.kernels.kv_codec import quantize_e4m3_reference
from kvasir.kernels.pack_blocks import (
    Codec,
    pack_blocks,
    pack_blocks_reference,
    payload_bytes,
    unpack_blocks,
    unpack_blocks_reference,
)
from kvasir.kernels.triton import pack_blocks as kernel

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CODECS: list[Codec] = ["none", "fp16", "int8", "fp8"]
any_shape = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
EDGES = [0.0, -0.0, 65504.0, 65519.0, 65520.0, -65520.0, 3e38, -3e38, 2**-14, 2**-24, 2**-25, 1e-40, 2**-101, 2**-102]


def some_cache(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """[N, L, 2, K, B, D]: rows of all magnitudes; of zeros; with NaN, an infinity, values at the edges of float16."""
    generator = torch.Generator().manual_seed(sum(shape))
    magnitudes = torch.exp2(torch.randint(-30, 20, (*shape[:-1], 1), generator=generator))
    values = (torch.randn(shape, generator=generator) * magnitudes).view(-1, shape[-1])
    values[::7] = 0
    values[1::11, 0] = torch.nan
    values[2::11, -1] = -torch.inf
    edges = torch.tensor(EDGES).repeat(-(-shape[-1] // len(EDGES)))[: shape[-1]]
    values[3::13] = edges
    values[5::17] *= 2.0**-110
    values[4::13] = edges.clamp(-3, 3)
    return values.view(shape).to(dtype).to(device)


def staging_for(cache: Tensor, num_blocks: int, codec: Codec, heads: range | None) -> tuple[Tensor, Tensor]:
    """-> [P, payload bytes], the same with 32 bytes more on each side; full of 0xA5"""
    size = payload_bytes(cache, codec, heads)
    wide = torch.full((num_blocks, size + 64), 0xA5, dtype=torch.uint8, device=cache.device)
    return wide[:, 32 : 32 + size], wide


def is_same(a: Tensor, b: Tensor) -> bool:
    """NaN is NaN, whatever it carries; and zeros have signs."""
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


@any_shape
@given(
    blocks=st.lists(st.integers(0, 4), max_size=4, unique=True), layers=st.integers(1, 2),
    heads=st.sampled_from([(1, 0, 1), (3, 0, 3), (3, 1, 3), (4, 2, 3)]), block_size=st.sampled_from([1, 7, 16]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]), dtype=st.sampled_from(DTYPES), codec=st.sampled_from(CODECS),
    rows_at_once=st.sampled_from([4, 16]),
)  # fmt: skip
@example(  # what is packed is rounded to bfloat16 on its way back
    blocks=[3, 0], layers=2, heads=(3, 1, 3), block_size=7, head_dim=80, dtype=torch.bfloat16, codec="int8",
    rows_at_once=4,
)  # fmt: skip
def test_any_shape_there_and_back(
    blocks: list[int], layers: int, heads: tuple[int, int, int], block_size: int, head_dim: int, dtype: torch.dtype,
    codec: Codec, rows_at_once: int, device: str,
) -> None:  # fmt: skip
    num_heads, first, last = heads
    cache = some_cache((5, layers, 2, num_heads, block_size, head_dim), dtype, device)
    ids, taken = torch.tensor(blocks, dtype=torch.int64, device=device), range(first, last)
    staging, wide = staging_for(cache, len(blocks), codec, taken)
    expected = staging_for(cache, len(blocks), codec, taken)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_VALUES_A_PROGRAM", rows_at_once * 128)
        pack_blocks(cache, ids, staging, codec=codec, heads=taken)
        pack_blocks_reference(cache, ids, expected, codec=codec, heads=taken)
        if codec != "fp16":  # where the codec itself says what becomes of NaN: below
            assert torch.equal(staging, expected)
        assert bool((wide[:, :32] == 0xA5).all() and (wide[:, -32:] == 0xA5).all())
        unpacked, wanted = torch.full_like(cache, 7.0), torch.full_like(cache, 7.0)
        unpack_blocks(staging, ids, unpacked, codec=codec, heads=taken)
        unpack_blocks_reference(expected, ids, wanted, codec=codec, heads=taken)
    assert is_same(unpacked, wanted)
    if codec == "none":
        assert torch.equal(unpacked[ids, :, :, first:last].nan_to_num(), cache[ids, :, :, first:last].nan_to_num())


@pytest.mark.parametrize(("codec", "dtype"), list(product(CODECS, DTYPES)))
def test_the_bytes_are_those_that_a_cpu_node_sends(codec: Codec, dtype: torch.dtype, device: str) -> None:
    pytest.importorskip("zstandard", reason="a connector wants more than a machine with a GPU may have")
    from kvasir.kv_connector import codec as connector_codec
    from kvasir.kv_connector.codec_packing import TAG_BYTES

    cache = some_cache((3, 2, 2, 2, 16, 64), dtype, device)
    layout = KVLayout(
        num_layers=2, num_kv_heads=2, total_kv_heads=2, head_dim=64, block_size=16, dtype=str(dtype).split(".")[1]
    )
    staging, _ = staging_for(cache, 1, codec, None)
    pack_blocks(cache, torch.tensor([2], device=device), staging, codec=codec)
    block = cache[2].cpu().contiguous().view(-1).view(torch.uint8).numpy()
    expected = bytes(connector_codec.encode(codec, block.data, layout))
    assert staging[0].cpu().numpy().tobytes() == expected[0 if codec == "none" else TAG_BYTES :]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float16_is_made_as_the_cpu_makes_it(dtype: torch.dtype, device: str) -> None:
    """NaN included: its bits are chosen, so that every machine sends the same bytes of the same block."""
    bits = torch.arange(2**16, dtype=torch.int32)
    values = (bits << 16).view(torch.float32) if dtype != torch.float16 else bits.to(torch.int16).view(dtype)
    if dtype == torch.float32:
        near = bits.to(torch.int16).view(torch.float16).float().view(torch.int32)
        values = torch.cat((values, *((near + 0x1000 + offset).view(torch.float32) for offset in (-1, 0, 1))))
    cache = values.to(dtype).view(1, 1, 2, 1, -1, 128).to(device)
    staging, _ = staging_for(cache, 1, "fp16", None)
    pack_blocks(cache, torch.tensor([0], device=device), staging, codec="fp16")
    expected = np.empty(2 * cache.numel(), np.uint8)
    source = cache.cpu().view(-1).view(torch.uint8).numpy()
    kv_codec.convert(source, str(dtype).split(".")[1], expected, "float16")
    assert staging[0].cpu().numpy().tobytes() == expected.tobytes()


def test_a_range_of_heads_is_what_a_node_with_those_heads_packs(device: str) -> None:
    cache = some_cache((3, 2, 2, 4, 8, 64), torch.bfloat16, device)
    shard = cache[:, :, :, 1:3].contiguous()
    ids = torch.tensor([2, 0], device=device)
    mine, theirs = staging_for(cache, 2, "int8", range(1, 3))[0], staging_for(shard, 2, "int8", None)[0]
    pack_blocks(cache, ids, mine, codec="int8", heads=range(1, 3))
    pack_blocks(shard, ids, theirs, codec="int8")
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("codec", ["fp16", "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_node_of_another_dtype_has_packed(codec: Codec, dtype: torch.dtype, device: str) -> None:
    """Its values may be too large for float16: they saturate."""
    cache = some_cache((2, 1, 2, 2, 8, 64), torch.float32, device) * 100
    ids = torch.tensor([1, 0], device=device)
    staging, _ = staging_for(cache, 2, codec, None)
    pack_blocks(cache, ids, staging, codec=codec)
    mine, wanted = (torch.full_like(cache, 7.0, dtype=dtype) for _ in range(2))
    unpack_blocks(staging, ids, mine, codec=codec)
    unpack_blocks_reference(staging, ids, wanted, codec=codec)
    assert is_same(mine, wanted)
    assert bool((wanted.abs() >= 65504).any())


def test_what_lies_between_two_values_of_fp8_goes_to_the_even_one(device: str) -> None:
    """All such values, in a row whose scale is 1; torch's own cast says where they go."""
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    row = torch.cat((torch.tensor([448.0]), (steps[1:] + steps[:-1]) / 2, torch.zeros(1)))
    cache = torch.stack((row, -row)).view(1, 1, 2, 1, 1, 128).to(device)
    staging, _ = staging_for(cache, 1, "fp8", None)
    pack_blocks(cache, torch.tensor([0], device=device), staging, codec="fp8")
    assert torch.equal(staging[0, 8:].cpu(), torch.cat((row, -row)).to(torch.float8_e4m3fn).view(torch.uint8))


def test_an_error_of_fp8_is_at_most_a_16th_of_the_value_or_half_the_smallest_step(device: str) -> None:
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    cache = values.view(1, 1, 2, 4, 8, 128).to(device)
    staging, _ = staging_for(cache, 1, "fp8", None)
    ids = torch.tensor([0], device=device)
    pack_blocks(cache, ids, staging, codec="fp8")
    back = torch.full_like(cache, torch.nan)
    unpack_blocks(staging, ids, back, codec="fp8")
    error = (back.cpu().view(64, 128).double() - values.double()).abs()
    scales = quantize_e4m3_reference(values)[0].double()[:, None]
    assert bool((error <= torch.maximum(values.double().abs() / 16, scales * 2**-10) * (1 + 1e-6)).all())


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "zip"}, {"heads": range(0)}, {"heads": range(1, 3)}, {"heads": range(0, 2, 2)},
        {"staging": torch.empty(1, 7, dtype=torch.uint8)}, {"blocks": torch.tensor([0], dtype=torch.int32)},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_a_kernel_runs_over_its_ends(change: dict[str, object]) -> None:
    cache = torch.zeros(1, 1, 2, 2, 4, 64)
    arguments = {"blocks": torch.tensor([0]), "staging": torch.empty(1, 4096, dtype=torch.uint8)} | change
    with pytest.raises(ValueError, match=r"codec|heads|staging|int64"):
        pack_blocks(cache, **arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(("codec", "dtype"), list(product(CODECS, DTYPES)))
def test_full_shapes_beyond_2_31_values(codec: Codec, dtype: torch.dtype, device: str) -> None:
    """Blocks of an 8B model, of which the last lie behind 2^31 values."""
    num_blocks = 2**31 // (32 * 2 * 8 * 16 * 128) + 3
    cache = torch.zeros((num_blocks, 32, 2, 8, 16, 128), dtype=dtype, device=device)
    ids = torch.tensor([num_blocks - 1, 3, num_blocks - 2], device=device)
    cache[ids] = some_cache((3, 32, 2, 8, 16, 128), dtype, device)
    staging, expected = staging_for(cache, 3, codec, None)[0], staging_for(cache, 3, codec, None)[0]
    pack_blocks(cache, ids, staging, codec=codec)
    small, own = cache[ids], torch.arange(3, device=device)
    pack_blocks_reference(small, own, expected, codec=codec)
    assert codec == "fp16" or torch.equal(staging, expected)
    cache[ids] = 7.0
    unpack_blocks(staging, ids, cache, codec=codec)
    unpack_blocks_reference(expected, own, small, codec=codec)
    assert is_same(cache[ids], small)
    assert int((cache != 0).any(-1).sum()) <= 3 * 32 * 2 * 8 * 16, "no other block was written"
