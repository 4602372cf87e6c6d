import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.prefill_attention import prefill_attention
from tests.unit.kernels.triton.attention_cases import LAYER, Attention, build, check_prefill

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# Tiles are 64 keys (32 in fp32) and 128 rows (32), a row for each token and query head of a group.
CASES = {
    "one token of one": Attention(lengths=[1], num_new=[1], dtype=F16),
    "whole prompts around a tile of keys": Attention(lengths=[63, 64, 65], num_new=[63, 64, 65], dtype=F16),
    "rows around a tile": Attention(lengths=[15, 16, 17, 33], num_new=[15, 16, 17, 33]),
    "later chunks": Attention(lengths=[130, 97, 129], num_new=[2, 33, 65], dtype=BF16),
    "nothing new, and no sequence": Attention(lengths=[20, 0, 5, 0], num_new=[0, 0, 5, 0], dtype=F16),
    "one head for each": Attention(lengths=[40, 17], num_new=[9, 17], heads=3, kv_heads=3),
    "group of 7": Attention(lengths=[50, 18], num_new=[20, 18], heads=14, kv_heads=2, dtype=F16),
    "one KV head": Attention(lengths=[70], num_new=[12], heads=8, kv_heads=1, dtype=BF16),
    "head dim 80": Attention(lengths=[33, 70], num_new=[33, 3], head_dim=80, dtype=F16),
    "head dim 96": Attention(lengths=[33, 70], num_new=[33, 3], head_dim=96),
    "head dim 128": Attention(lengths=[65, 70], num_new=[65, 3], head_dim=128, dtype=BF16),
    "head dim 256": Attention(lengths=[33, 70], num_new=[33, 3], head_dim=256, dtype=F16),
    "head dim 256, fp32": Attention(lengths=[17, 35], num_new=[17, 3], heads=2, head_dim=256),
    "window of 1": Attention(lengths=[66, 70], num_new=[66, 3], window=1, dtype=F16),
    "window within a tile": Attention(lengths=[150, 40], num_new=[30, 40], window=20),
    "window over tiles": Attention(lengths=[260, 139], num_new=[70, 139], window=100, dtype=F16),
    "window longer than all": Attention(lengths=[60], num_new=[60], window=1000, dtype=BF16),
    "soft cap": Attention(lengths=[70, 30], num_new=[20, 30], softcap=2.0, magnitude=4.0),
    "soft cap far above": Attention(lengths=[40], num_new=[40], softcap=50.0, dtype=F16),
    "soft cap, scores beyond": Attention(lengths=[70], num_new=[20], softcap=30.0, magnitude=500.0, dtype=BF16),
    "large scores": Attention(lengths=[100, 40], num_new=[30, 40], magnitude=100.0, dtype=F16),
    "blocks of 1": Attention(lengths=[35], num_new=[9], block=1, dtype=F16),
    "blocks of 17": Attention(lengths=[70], num_new=[9], block=17),
    "blocks larger than a tile": Attention(lengths=[150], num_new=[20], block=128),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_what_the_definition_says(case: Attention, device: str) -> None:
    check_prefill(case, device)


def lengths_and_new() -> st.SearchStrategy[list[tuple[int, int]]]:
    around = st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65])
    pair = st.tuples(around, st.integers(0, 40)).map(lambda drawn: (drawn[0] + drawn[1], drawn[1]))
    return st.lists(pair, min_size=1, max_size=3)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    sequences=lengths_and_new(),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    head_dim=st.sampled_from([64, 80, 96, 128]),
    window=st.sampled_from([0, 0, 7, 40]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    dtype=st.sampled_from([F16, BF16, F32]),
)
def test_any_shape(
    sequences: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, window: int, softcap: float,
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    lengths, num_new = map(list, zip(*sequences, strict=True))
    case = Attention(
        lengths=lengths, num_new=num_new, heads=heads[0], kv_heads=heads[1], head_dim=head_dim,
        window=window, softcap=softcap, dtype=dtype,
    )  # fmt: skip
    check_prefill(case, device)


@pytest.mark.parametrize("operation", ["prefill", "decode"])
def test_a_broken_key_shows_in_its_own_sequence_alone(operation: str, device: str) -> None:
    """A NaN must come out as NaN, for the sampler to find, and must not reach the neighbours."""
    step = build(Attention(lengths=[40, 40], num_new=[1, 1]), device)
    step.kv_cache[step.block_tables[0, 1].long(), LAYER, 0, 0, 3] = torch.nan
    out = torch.zeros(2, step.case.heads * step.case.head_dim, device=device)
    if operation == "prefill":
        prefill_attention(
            step.query, step.kv_cache, LAYER, step.block_tables, step.query_starts, step.seq_lens, out, scale=0.125
        )
    else:
        decode_attention(step.query, step.kv_cache, LAYER, step.block_tables, step.seq_lens, out, scale=0.125)
    assert out[0].isnan().any()
    assert not out[1].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (4096, 0.0), (1000, 30.0)])
def test_full_shapes(dtype: torch.dtype, head_dim: int, window: int, softcap: float, device: str) -> None:
    """A prompt of 32k tokens, later chunks of others, and many short ones."""
    case = Attention(
        lengths=[32_768, 20_001, 8192, *range(1, 200, 3)], num_new=[32_768, 513, 2048, *range(1, 200, 3)],
        heads=8, kv_heads=2, head_dim=head_dim, window=window, softcap=softcap, dtype=dtype,
    )  # fmt: skip
    check_prefill(case, device, sampled=100)
