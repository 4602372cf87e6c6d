"""Decode steps as CUDA graphs: the model's hundreds of launches are recorded once and then replayed by one.

A graph reads and writes the memory it was captured with, and has one shape. So there is one graph for each of some
numbers of sequences, all on the first rows of the same buffers; a batch is padded up to the next of them:

    a batch of 5   | s0 s1 s2 s3 s4 |  .  .  . |       captured: 1, 2, 4, 8, 16, 24, ...
                                      padding: slot -1 (not written), length 0 (nothing to attend to)

Where tokens are drafted there are as many graphs again, of 1 + num_speculative_tokens tokens for each sequence.

The CPU's counterpart is `kvasir.engine.models.recorded`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs, HostBatch
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.rope import RopeTable
from kvasir.kernels.backend import is_triton

# Shapes: S sequences  Q tokens of each  M blocks of the longest sequence  C hidden size

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]  # of a function on tensors that stay where they are

_MOST_SEQUENCES = 512  # with more of them, the launches are hidden behind the work


def captured_sizes(max_num_seqs: int) -> list[int]:
    """20 -> [1, 2, 4, 8, 16, 20]"""
    most = min(max_num_seqs, _MOST_SEQUENCES)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, _MOST_SEQUENCES, 16)]
    return [*(size for size in steps if size < most), most]


def can_be_captured(config: ModelConfig, kv_cache: Tensor) -> bool:
    """Experts are chosen by a look from the host, and the torch references look at slots."""
    return kv_cache.is_cuda and is_triton(kv_cache) and config.experts is None


class DecodeGraphs:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        forward: Callable[[BatchInputs], Tensor],
        rope_tables: Sequence[RopeTable],
        sizes: Sequence[int],
        max_blocks: int,
        device: torch.device,
        capture: Capture,
        max_tokens_each: int = 1,
    ) -> None:
        """forward: -> hidden [S Q, C]      sizes: ascending      max_blocks, max_tokens_each: of one sequence"""
        self._sizes = list(sizes)
        self._tokens_each = sorted({1, max_tokens_each})
        self._inputs = _padding(sizes[-1], max_tokens_each, max_blocks, rope_tables, device)
        # The largest first: the others find memory enough in what it has let go of.
        shapes = [(size, tokens_each) for tokens_each in self._tokens_each for size in sizes]
        self._replays = {shape: capture(partial(forward, _first(self._inputs, *shape))) for shape in reversed(shapes)}

    def shape_for(self, batch: HostBatch) -> tuple[int, int] | None:
        """To what number of sequences and tokens of each the batch is to be padded; None: it is too large for all."""
        num_sequences, num_tokens = len(batch.seq_lens), int(batch.tokens_of_sequences.max())
        size, each = bisect_left(self._sizes, num_sequences), bisect_left(self._tokens_each, num_tokens)
        if size == len(self._sizes) or each == len(self._tokens_each):
            return None
        if num_tokens > 1 and batch.is_scored:
            return None  # its tokens must stay where they are
        return self._sizes[size], self._tokens_each[each]

    def run(self, batch: BatchInputs) -> Tensor:
        """batch: of one of the captured shapes -> hidden [S Q, C], which holds until the next call"""
        size, width = batch.block_tables.shape
        own = _first(self._inputs, size, batch.tokens_each)
        own.token_ids.copy_(batch.token_ids)
        own.slot_mapping.copy_(batch.slot_mapping)
        own.seq_lens.copy_(batch.seq_lens)
        own.block_tables[:, :width].copy_(batch.block_tables)  # what lies behind belongs to nobody's length
        for mine, given in zip(own.ropes, batch.ropes, strict=True):
            mine[0].copy_(given[0])
            mine[1].copy_(given[1])
        return self._replays[size, batch.tokens_each]()


class CudaCapture:
    """A `Capture`. All graphs share one pool of memory: no two of them run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Replay:
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            function()  # kernels are compiled, and libraries take their workspace: neither may happen in a capture
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = function()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _padding(
    num_sequences: int, tokens_each: int, max_blocks: int, rope_tables: Sequence[RopeTable], device: torch.device
) -> BatchInputs:
    """A batch of nothing but padding"""
    num_tokens = num_sequences * tokens_each

    def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return BatchInputs(
        num_decodes=num_sequences,
        tokens_each=tokens_each,
        token_ids=full(num_tokens),
        ropes=tuple((cos[:1].repeat(num_tokens, 1), sin[:1].repeat(num_tokens, 1)) for cos, sin in rope_tables),
        slot_mapping=full(num_tokens, value=-1),
        block_tables=full(num_sequences, max_blocks, dtype=torch.int32),
        seq_lens=full(num_sequences, dtype=torch.int32),
        query_starts=full(1, dtype=torch.int32),
        sampled_tokens=full(0),
    )


def _first(batch: BatchInputs, num_sequences: int, tokens_each: int) -> BatchInputs:
    tokens, sequences = slice(num_sequences * tokens_each), slice(num_sequences)
    return replace(
        batch,
        num_decodes=num_sequences,
        tokens_each=tokens_each,
        token_ids=batch.token_ids[tokens],
        ropes=tuple((cos[tokens], sin[tokens]) for cos, sin in batch.ropes),
        slot_mapping=batch.slot_mapping[tokens],
        block_tables=batch.block_tables[sequences],
        seq_lens=batch.seq_lens[sequences],
    )
