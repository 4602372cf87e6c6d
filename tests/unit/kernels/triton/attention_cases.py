"""Steps of attention over a paged cache in which everything that must not be read is NaN, and their results in float64.

The expected result takes each token by itself, straight from the definition: no tiles, no blocks, no batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir.kernels.decode_attention import decode_attention
from kvasir.kernels.prefill_attention import prefill_attention
from tests.unit.kernels.triton.tolerances import assert_near

# Shapes: T tokens of the step  C tokens of a sequence  H query heads  K KV heads  B tokens a block  D head dim
NUM_LAYERS, LAYER = 2, 1
UNTOUCHED = 7.0  # in the rows around `out`


@dataclass(frozen=True, kw_only=True)
class Attention:
    lengths: list[int]
    num_new: list[int]  # of these, the last so many are the step's
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block: int = 16
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    magnitude: float = 1.0  # of the queries

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Step:
    case: Attention
    query: Tensor  # [T, (H + 2 K) D]: what follows the queries is NaN
    kv: list[Tensor]  # of each sequence [2, K, C, D]
    kv_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor


def build(case: Attention, device: str) -> Step:
    generator = torch.Generator(device).manual_seed(sum(case.lengths) + case.heads + case.head_dim)
    options = {"dtype": case.dtype, "device": device}
    counts = [-(-length // case.block) for length in case.lengths]
    poison = sum(counts)  # a block of nobody: tables lead there behind their end
    shape = (poison + 1, NUM_LAYERS, 2, case.kv_heads, case.block, case.head_dim)
    kv_cache = torch.full(shape, torch.nan, **options)
    free = torch.randperm(poison, generator=generator, device=device).int()
    tables = torch.full((len(counts), max(counts) + 3), poison, dtype=torch.int32, device=device)
    kv = []
    for row, (length, new, count) in enumerate(zip(case.lengths, case.num_new, counts, strict=True)):
        tables[row, :count], free = free[:count], free[count:]
        tokens = torch.randn(2, case.kv_heads, length, case.head_dim, generator=generator, **options)
        kv.append(tokens)
        padded = torch.full((2, case.kv_heads, count * case.block, case.head_dim), torch.nan, **options)
        first_seen = max(length - new - case.window + 1, 0) if case.window else 0
        padded[:, :, first_seen:length] = tokens[:, :, first_seen:]
        blocks = padded.view(2, case.kv_heads, count, case.block, case.head_dim).permute(2, 0, 1, 3, 4)
        kv_cache[tables[row, :count].long(), LAYER] = blocks
    num_tokens = sum(case.num_new)
    query = torch.full((num_tokens, (case.heads + 2 * case.kv_heads) * case.head_dim), torch.nan, **options)
    width = case.heads * case.head_dim
    query[:, :width] = torch.randn(num_tokens, width, generator=generator, **options) * case.magnitude
    starts = torch.tensor([0, *case.num_new], device=device).cumsum(0).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return Step(case, query, kv, kv_cache, tables, starts, lengths)


def check_prefill(case: Attention, device: str, sampled: int = 0) -> None:
    """sampled: look at so many tokens of each chunk, its ends among them; 0: at all"""
    step = build(case, device)
    out, guarded = _out(step)
    prefill_attention(
        step.query, step.kv_cache, LAYER, step.block_tables, step.query_starts, step.seq_lens, out,
        scale=case.scale, window=case.window, softcap=case.softcap,
    )  # fmt: skip
    _check(step, out, guarded, sampled)


def check_decode(case: Attention, device: str) -> None:
    step = build(case, device)
    assert len(set(case.num_new)) == 1, "as many new tokens in each sequence"
    out, guarded = _out(step)
    decode_attention(
        step.query, step.kv_cache, LAYER, step.block_tables, step.seq_lens, out,
        scale=case.scale, window=case.window, softcap=case.softcap,
    )  # fmt: skip
    _check(step, out, guarded, 0)


def _out(step: Step) -> tuple[Tensor, Tensor]:
    """-> out [T, H D], NaN; the same with a row before it and one after it"""
    width = step.case.heads * step.case.head_dim
    guarded = torch.full((len(step.query) + 2, width), UNTOUCHED, dtype=step.case.dtype, device=step.query.device)
    guarded[1:-1] = torch.nan
    return guarded[1:-1], guarded


def _check(step: Step, out: Tensor, guarded: Tensor, sampled: int) -> None:
    for row, (length, new) in enumerate(zip(step.case.lengths, step.case.num_new, strict=True)):
        tokens = torch.arange(new, device=out.device)
        if 0 < sampled < new:
            tokens = torch.linspace(0, new - 1, sampled, device=out.device).long()
        at = int(step.query_starts[row]) + tokens
        assert_near(out[at], expected(step, row, step.query[at], length - new + tokens))
    assert guarded[[0, -1]].eq(UNTOUCHED).all()


def expected(step: Step, row: int, query: Tensor, positions: Tensor) -> Tensor:
    """query [t, >= H D] of tokens at `positions` [t] of sequence `row` -> [t, H D] float64; who sees nothing gets 0"""
    case = step.case
    keys, values = step.kv[row].double().repeat_interleave(case.heads // case.kv_heads, dim=1)  # [H, C, D]
    queries = query[:, : case.heads * case.head_dim].double().view(len(query), case.heads, case.head_dim)
    scores = torch.einsum("thd,hcd->thc", queries, keys) * case.scale
    if case.softcap > 0:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = positions[:, None] - torch.arange(keys.shape[1], device=query.device)  # [t, C]
    seen = (distance >= 0) & (distance < case.window) if case.window else distance >= 0
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).masked_fill(~seen[:, None], 0)
    return torch.einsum("thc,hcd->thd", weights, values).flatten(1)
