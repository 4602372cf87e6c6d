"""The compiled attention loops against the torch reference that defines them."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from tests.unit.kernels.paged import LAYER, Paged, paged

SHAPES = [  # heads, KV heads, head dim, block size
    (9, 3, 64, 16),
    (4, 4, 8, 4),
    (8, 1, 80, 16),
    (4, 2, 128, 32),
    (3, 1, 16, 1),
    (2, 2, 32, 17),
    (2, 1, 96, 16),
    (4, 1, 256, 16),
]


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def reference(step: Paged, window: int = 0, softcap: float = 0) -> Tensor:
    out = torch.empty(len(step.query), step.width)
    prefill_attention_reference(
        step.query, step.kv_cache, LAYER, step.block_tables, step.query_starts, step.seq_lens, out,
        scale=step.scale, window=window, softcap=softcap,
    )  # fmt: skip
    return out


def prefill(step: Paged, window: int = 0, softcap: float = 0) -> Tensor:
    out = torch.full((len(step.query), step.width), torch.nan)
    prefill_attention(
        step.query, step.kv_cache, LAYER, step.block_tables, step.query_starts, step.seq_lens, out,
        scale=step.scale, window=window, softcap=softcap,
    )  # fmt: skip
    return out


def decode(step: Paged, window: int = 0, softcap: float = 0) -> Tensor:
    out = torch.full((len(step.query), step.width), torch.nan)
    decode_attention(
        step.query, step.kv_cache, LAYER, step.block_tables, step.seq_lens, out,
        scale=step.scale, window=window, softcap=softcap,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), SHAPES)
@pytest.mark.parametrize("window", [0, 1, 20])
def test_decode_agrees_with_the_reference(
    heads: int, kv_heads: int, head_dim: int, block: int, window: int, num_threads: int
) -> None:
    lengths = [1, 2, block, block + 1, 3 * block, 150]
    step = paged(lengths, [1] * len(lengths), heads=heads, kv_heads=kv_heads, head_dim=head_dim, block=block)
    torch.testing.assert_close(decode(step, window), reference(step, window), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), SHAPES)
@pytest.mark.parametrize("window", [0, 1, 20, 100])
def test_prefill_agrees_with_the_reference(
    heads: int, kv_heads: int, head_dim: int, block: int, window: int, num_threads: int
) -> None:
    """Whole prompts and later chunks; shorter and longer than the loop's tiles of 64 queries and 64 keys."""
    lengths, num_new = [2, 64, 65, 200, 131], [2, 64, 65, 3, 130]
    step = paged(lengths, num_new, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block=block)
    torch.testing.assert_close(prefill(step, window), reference(step, window), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("window", [0, 20])
def test_soft_caps_agree_with_the_reference(softcap: float, window: int) -> None:
    step = paged([2, 64, 65, 150], [2, 64, 3, 70], heads=4, kv_heads=2, head_dim=80, block=16)
    step.query[::2] *= 20  # so that the cap is felt: scores of up to 60
    expected = reference(step, window, softcap)
    torch.testing.assert_close(prefill(step, window, softcap), expected, rtol=1e-4, atol=2e-5)
    step = paged([1, 17, 150], [1, 1, 1], heads=4, kv_heads=2, head_dim=80, block=16)
    step.query[1] *= 20
    torch.testing.assert_close(decode(step, window, softcap), reference(step, window, softcap), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_several_tokens_of_each_sequence(softcap: float) -> None:
    step = paged([3, 40, 150], [3, 3, 3], heads=4, kv_heads=2, head_dim=64, block=16)
    torch.testing.assert_close(decode(step, 20, softcap), reference(step, 20, softcap), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (20, 5.0)])
def test_caches_in_fewer_bytes_agree_with_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block: int, window: int, softcap: float
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block": block}
    lengths, num_new = [2, 65, 200, 131], [2, 65, 3, 130]
    step = paged(lengths, num_new, **shape).in_dtype(dtype)
    expected = reference(step, window, softcap)
    torch.testing.assert_close(prefill(step, window, softcap), expected, rtol=1e-4, atol=2e-5)
    step = paged([1, 2, block, block + 1, 3 * block, 150], [1] * 6, **shape).in_dtype(dtype)
    torch.testing.assert_close(decode(step, window, softcap), reference(step, window, softcap), rtol=1e-4, atol=2e-5)


def test_a_scale_is_its_own_tokens_alone() -> None:
    """By hand: one head, blocks of 4 tokens; the only value that counts is that of the last of 6 tokens."""
    kv_cache = torch.zeros(2, 2, 2, 1, 4, 8 + 4, dtype=torch.int8)
    head = kv_cache[1, LAYER].view(2, -1)  # keys, values: [4 x 8 | 4 scales]
    head[0, 8:16] = 100
    head[0, 32:].view(torch.float32)[:2] = torch.tensor([1.0, 0.5])
    head[1, 8:16] = torch.arange(8)
    head[1, 32:].view(torch.float32)[:] = torch.tensor([torch.nan, 0.25, torch.nan, torch.nan])
    head[1, 32:].view(torch.float32)[0] = 3.0
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    step = Paged(torch.ones(1, 8), kv_cache, torch.tensor([[0, 1]], dtype=torch.int32), starts, lengths, 8)
    for attend in (decode, prefill, reference):  # the last key's score is 400 x 8^-0.5, all others' 0
        torch.testing.assert_close(attend(step), torch.arange(8).float()[None] * 0.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_a_broken_value_shows_whatever_the_cache_is_in(dtype: torch.dtype) -> None:
    step = paged([40, 40], [1, 1], heads=4, kv_heads=2, head_dim=64, block=16)
    step.kv_cache[step.block_tables[0, 1], LAYER, 1, 0, 3, 5] = torch.nan
    for out in (decode(step.in_dtype(dtype)), prefill(step.in_dtype(dtype))):
        assert out[0].isnan().any()
        assert not out[1].isnan().any()


def test_a_sequence_does_not_feel_the_others() -> None:
    together = paged([300, 70, 5], [100, 70, 1], heads=4, kv_heads=2, head_dim=64, block=16)
    out = prefill(together)
    for row in range(3):
        first, last = int(together.query_starts[row]), int(together.query_starts[row + 1])
        alone = Paged(
            together.query[first:last], together.kv_cache, together.block_tables[row : row + 1],
            torch.tensor([0, last - first], dtype=torch.int32), together.seq_lens[row : row + 1], together.width,
        )  # fmt: skip
        assert torch.equal(prefill(alone), out[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (300, 5.0)])
def test_decode_of_long_sequences(dtype: torch.dtype, window: int, softcap: float) -> None:
    """Several splits of a sequence; the widest row of the block table decides how many there may be."""
    step = paged([900, 0, 128, 129, 513], [1] * 5, heads=7, kv_heads=1, head_dim=64, block=16).in_dtype(dtype)
    expected = reference(step, window, softcap)
    torch.testing.assert_close(decode(step, window, softcap), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize("window", [0, 300])
def test_decode_is_the_same_to_the_last_bit_in_any_batch_and_on_any_number_of_threads(
    window: int, dtype: torch.dtype
) -> None:
    """Together, a piece of work is three heads; alone, and with more threads than there is work for, it is one."""
    together = paged([900, 5, 300, 128], [1] * 4, heads=9, kv_heads=3, head_dim=64, block=16).in_dtype(dtype)
    before = torch.get_num_threads()
    out = decode(together, window)
    torch.testing.assert_close(out, reference(together, window), rtol=1e-4, atol=2e-5)
    try:
        for num_threads in (1, 2, 3):  # 900 tokens are 8 splits
            torch.set_num_threads(num_threads)
            for row in range(4):
                columns = -(-int(together.seq_lens[row]) // 16)
                only = slice(row, row + 1)
                alone = Paged(
                    together.query[only], together.kv_cache, together.block_tables[only, :columns].contiguous(),
                    torch.tensor([0, 1], dtype=torch.int32), together.seq_lens[only], together.width,
                )  # fmt: skip
                assert torch.equal(decode(alone, window), out[only])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(9, 3, 64, 16), (8, 1, 80, 4), (2, 2, 6, 18)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (150, 5.0)])
def test_a_token_gets_the_same_bits_in_any_step(
    heads: int, kv_heads: int, head_dim: int, block: int, window: int, softcap: float, dtype: torch.dtype,
    num_threads: int,
) -> None:  # fmt: skip
    """In a whole prompt, in chunks of it, alone or with others; and by the loop for single tokens."""
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block": block}
    step = paged([300], [300], **shape).in_dtype(dtype)
    whole = prefill(step, window, softcap)

    def part(start: int, end: int) -> Paged:
        starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, end - start], [end]))
        return Paged(step.query[start:end], step.kv_cache, step.block_tables, starts, lengths, step.width)

    for size in (1, 7, 64, 129):
        for start in range(0, 300, size):
            end = min(start + size, 300)
            assert torch.equal(prefill(part(start, end), window, softcap), whole[start:end])
    for start in (0, 127, 128, 299):
        assert torch.equal(decode(part(start, start + 1), window, softcap), whole[start : start + 1])
    each = torch.arange(301, dtype=torch.int32)
    together = Paged(step.query, step.kv_cache, step.block_tables.repeat(300, 1), each, each[1:].clone(), step.width)
    assert torch.equal(decode(together, window, softcap), whole)


def test_large_scores_do_not_overflow() -> None:
    step = paged([100, 40], [30, 40], heads=4, kv_heads=2, head_dim=64, block=16)
    step.query.mul_(1e3)
    torch.testing.assert_close(prefill(step), reference(step), rtol=1e-3, atol=1e-3)


def test_a_broken_key_shows_in_its_own_sequence_alone() -> None:
    """A NaN must come out as NaN, for the sampler to find, and must not reach the neighbours."""
    step = paged([40, 40], [1, 1], heads=4, kv_heads=2, head_dim=64, block=16)
    step.kv_cache[step.block_tables[0, 1], LAYER, 0, 0, 3] = torch.nan
    for out in (decode(step), prefill(step), decode(step, softcap=5), prefill(step, softcap=5)):
        assert out[0].isnan().any()
        assert not out[1].isnan().any()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="features of an x86 CPU")
def test_loops_for_a_lesser_cpu_agree_with_the_reference() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "decode_agrees or prefill_agrees"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout
