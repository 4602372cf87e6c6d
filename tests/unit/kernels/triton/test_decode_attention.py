import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.kernels.triton import decode_attention
from tests.unit.kernels.triton.attention_cases import Attention, check_decode

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def decode(lengths: list[int], tokens_each: int = 1, **options: object) -> Attention:
    return Attention(lengths=lengths, num_new=[tokens_each] * len(lengths), **options)  # type: ignore[arg-type]


# Tiles are 16 KiB of keys: 64 tokens in fp32 and 128 in 16 bits where the head dim is 64.
CASES = {
    "one token of one": decode([1], dtype=F16),
    "around a block": decode([15, 16, 17]),
    "around a tile": decode([63, 64, 65]),
    "around a tile of 16 bits": decode([127, 128, 129], dtype=BF16),
    "one long, some short": decode([1, 700, 3, 70], dtype=F16),
    "more sequences than pieces": decode([5, 9, 17, 33, 2, 1, 4, 8, 3], kv_heads=4),
    "nobody": decode([0, 0]),
    "padding among them": decode([0, 30, 0, 0, 70, 0], dtype=BF16),
    "one head for each": decode([40, 70], heads=3, kv_heads=3),
    "group of 7": decode([50, 18], heads=14, kv_heads=2, dtype=F16),
    "group of 20": decode([90], heads=20, kv_heads=1),
    "2 tokens": decode([2, 40, 66], 2, dtype=F16),
    "3 tokens, of fewer": decode([1, 0, 3, 130], 3),
    "8 tokens": decode([64, 70, 130], 8, dtype=BF16),
    "8 tokens, window": decode([64, 70, 200], 8, window=5),
    "8 tokens of 12 heads: two groups of rows": decode([70, 9], 8, heads=12, kv_heads=1, dtype=F16),
    "head dim 80": decode([33, 70], head_dim=80, dtype=F16),
    "head dim 96": decode([33, 70], head_dim=96),
    "head dim 128": decode([65, 70], head_dim=128, dtype=BF16),
    "head dim 256": decode([33, 70], head_dim=256, dtype=F16),
    "head dim 256, fp32": decode([17, 35], head_dim=256),
    "window of 1": decode([66, 70], window=1, dtype=F16),
    "window within a tile": decode([150, 40], window=20),
    "window over tiles": decode([400, 130], window=150),
    "window longer than all": decode([60], window=1000, dtype=BF16),
    "soft cap": decode([70, 30], softcap=2.0, magnitude=4.0),
    "soft cap, scores beyond": decode([70], softcap=30.0, magnitude=500.0, dtype=BF16),
    "large scores": decode([100, 40], magnitude=100.0, dtype=F16),
    "blocks of 1": decode([35], block=1, dtype=F16),
    "blocks of 17": decode([70], block=17),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_what_the_definition_says(case: Attention, device: str) -> None:
    check_decode(case, device)


@pytest.mark.parametrize("pieces", [1, 40])
def test_pieces_of_any_size(pieces: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole sequence in one, or more pieces than are joined at a time."""
    monkeypatch.setattr(decode_attention, "PIECES_PER_PROCESSOR", pieces)
    monkeypatch.setattr(decode_attention, "TILE_BYTES", 4096)
    check_decode(decode([400, 3], heads=2, kv_heads=1), device)


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]), min_size=1, max_size=4
    ),
    tokens_each=st.integers(1, 8),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2)]),
    head_dim=st.sampled_from([64, 80, 96, 128]),
    window=st.sampled_from([0, 0, 7, 40]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    dtype=st.sampled_from([F16, BF16, F32]),
)
def test_any_shape(
    lengths: list[int], tokens_each: int, heads: tuple[int, int], head_dim: int, window: int, softcap: float,
    dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    case = decode(
        lengths, tokens_each, heads=heads[0], kv_heads=heads[1], head_dim=head_dim,
        window=window, softcap=softcap, dtype=dtype,
    )  # fmt: skip
    check_decode(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens_each", [1, 5, 8])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (4096, 0.0), (1000, 30.0)])
def test_full_shapes(
    dtype: torch.dtype, head_dim: int, tokens_each: int, window: int, softcap: float, device: str
) -> None:
    """32k tokens beside many shorter ones, and the padding of a captured batch."""
    lengths = [32_768, 16_001, *range(1, 4000, 31), *[0] * 40]
    case = decode(
        lengths, tokens_each, heads=8, kv_heads=2, head_dim=head_dim, window=window, softcap=softcap, dtype=dtype
    )
    check_decode(case, device)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_lengths(device: str) -> None:
    """The grid was fixed at capture; lengths, tables and queries are what the buffers hold at replay."""
    from tests.unit.kernels.triton.attention_cases import LAYER, build, expected
    from tests.unit.kernels.triton.tolerances import assert_near

    step = build(decode([3000, 17, 900, 1], dtype=BF16), device)
    out = torch.full_like(step.query[:, : 4 * 64].contiguous(), torch.nan)
    lengths = torch.tensor([1, 1, 1, 0], dtype=torch.int32, device=device)

    def attend() -> None:
        decode_attention.decode_attention(
            step.query, step.kv_cache, LAYER, step.block_tables, lengths, out, scale=step.case.scale
        )

    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    lengths.copy_(step.seq_lens)
    graph.replay()
    for row, length in enumerate(step.case.lengths):
        position = torch.tensor([length - 1], device=device)
        assert_near(out[row : row + 1], expected(step, row, step.query[row : row + 1], position))
