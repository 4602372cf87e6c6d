"""A step's plan as tensors: the tokens of all requests end to end, without padding, decodes first.

chunks      | d0 | d1 | d2 |  prefill p0  |    prefill p1    |
tokens      | .  | .  | .  | .  .  .  .   | .  .  .  .  .  . |      T
sequences     0    1    2         3                4                S
query_starts                0              4                  10     of the prefills alone
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir.engine.cuda_upload import upload
from kvasir.engine.models.rope import RopeTable
from kvasir.engine.step import Chunk, StepPlan

# Shapes: T tokens in this step  S sequences  P sequences with more than one token  M blocks of the longest
#   D head dim, or as much of it as is rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """What one forward pass needs, already on the device. Built once, read by every layer."""

    num_decodes: int  # the first so many sequences have `tokens_each` tokens
    tokens_each: int = 1
    token_ids: Tensor  # [T] int64
    ropes: tuple[RopeTable, ...]  # cos and sin [T, D / 2] of each token's position; for each rotation of the model
    slot_mapping: Tensor  # [T] int64, where each token's keys and values are written
    block_tables: Tensor  # [S, M] int32, padded with 0
    seq_lens: Tensor  # [S] int32, context length after this step
    query_starts: Tensor  # [P + 1] int32, of the tokens after the decodes
    sampled_tokens: Tensor  # [R] int64, the indices of the tokens whose logits are sampled from, in order


def decodes_first(plan: StepPlan) -> list[Chunk]:
    """The order in which `host_batch` wants the chunks."""
    return sorted(plan.chunks, key=lambda chunk: chunk.num_tokens > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """The same before it goes to the device, with positions [T] int64 in place of their rotations."""

    num_decodes: int
    tokens_each: int = 1
    is_scored: bool = False  # somebody asks for what becomes of tokens that are not sampled
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    sampled_tokens: NDArray[np.int64]

    @property
    def tokens_of_sequences(self) -> NDArray[np.int64]:
        """[S] how many tokens each has in this step"""
        return np.concatenate((np.full(self.num_decodes, self.tokens_each), np.diff(self.query_starts)))

    def padded(self, num_sequences: int, tokens_each: int = 1) -> "HostBatch":
        """All of them as decodes of `tokens_each` tokens, with more sequences behind them. Padding is written nowhere.

        tokens 1, 3, 2; 4 sequences of 3   | .  .  a | b  c  d | .  e  f | .  .  . |      the last ones are the newest
        """
        counts = self.tokens_of_sequences
        missing = num_sequences - len(counts)
        if missing == 0 and (counts == tokens_each).all() and self.num_decodes == num_sequences:
            return self
        ends, own_ends = tokens_each * np.arange(1, len(counts) + 1), np.cumsum(counts)
        places = np.arange(len(self.token_ids)) + np.repeat(ends - own_ends, counts)  # [T]

        def spread(values: NDArray[np.int64], padding: int) -> NDArray[np.int64]:
            out = np.full(num_sequences * tokens_each, padding, np.int64)
            out[places] = values
            return out

        return replace(
            self,
            num_decodes=num_sequences,
            tokens_each=tokens_each,
            token_ids=spread(self.token_ids, 0),
            positions=spread(self.positions, 0),
            slot_mapping=spread(self.slot_mapping, -1),
            block_tables=np.pad(self.block_tables, ((0, missing), (0, 0))),
            seq_lens=np.pad(self.seq_lens, (0, missing)),
            query_starts=np.zeros(1, np.int32),
            sampled_tokens=places[self.sampled_tokens],
        )

    def on_device(self, rope_tables: Sequence[RopeTable], device: torch.device) -> BatchInputs:
        arrays = (
            self.token_ids, self.positions, self.slot_mapping, self.block_tables, self.seq_lens, self.query_starts,
            self.sampled_tokens,
        )  # fmt: skip
        token_ids, at, slot_mapping, block_tables, seq_lens, query_starts, sampled_tokens = upload(arrays, device)
        return BatchInputs(
            num_decodes=self.num_decodes,
            tokens_each=self.tokens_each,
            token_ids=token_ids,
            ropes=tuple((cos[at], sin[at]) for cos, sin in rope_tables),
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_starts=query_starts,
            sampled_tokens=sampled_tokens,
        )


def host_batch(chunks: list[Chunk], block_size: int) -> HostBatch:
    num_tokens = np.array([chunk.num_tokens for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    ends_in_batch = np.cumsum(num_tokens)
    sequence = np.repeat(np.arange(len(chunks)), num_tokens)  # [T]
    positions = np.arange(ends_in_batch[-1]) - (ends_in_batch - num_tokens - starts)[sequence]
    block_tables = _block_tables(chunks, block_size)
    slots = block_tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_decodes = int((num_tokens == 1).sum())
    query_starts = np.concatenate(([0], np.cumsum(num_tokens[num_decodes:])))
    return HostBatch(
        num_decodes=num_decodes,
        is_scored=any(chunk.scored for chunk in chunks),
        token_ids=_token_ids(chunks),
        positions=positions,
        slot_mapping=slots,
        block_tables=block_tables,
        seq_lens=(starts + num_tokens).astype(np.int32),
        query_starts=query_starts.astype(np.int32),
        sampled_tokens=_sampled_tokens(chunks, ends_in_batch.tolist()),
    )


def build_batch(
    chunks: list[Chunk], block_size: int, rope_tables: Sequence[RopeTable], device: torch.device
) -> BatchInputs:
    return host_batch(chunks, block_size).on_device(rope_tables, device)


def _token_ids(chunks: list[Chunk]) -> NDArray[np.int64]:
    ids: list[int] = []
    for chunk in chunks:
        ids += tokens_between(chunk, chunk.start, chunk.end)
    return np.array(ids, dtype=np.int64)


def tokens_between(chunk: Chunk, start: int, end: int) -> list[int]:
    """Tokens [start, end) of the request: prompt, then outputs, then drafts."""
    request = chunk.request
    border = len(request.prompt_token_ids)
    if start < border:
        tokens = request.prompt_token_ids[start:end] + request.output_token_ids[: max(end - border, 0)]
    else:
        tokens = request.output_token_ids[start - border : end - border]
    return tokens + request.draft_token_ids[: end - start - len(tokens)]


def _sampled_tokens(chunks: list[Chunk], ends_in_batch: list[int]) -> NDArray[np.int64]:
    """The last token of each chunk that gives a next token, and those before its drafts."""
    indices: list[int] = []
    for chunk, end in zip(chunks, ends_in_batch, strict=True):
        if chunk.samplers:
            indices += range(end - 1 - chunk.num_drafts, end)
    return np.array(indices, dtype=np.int64)


def _block_tables(chunks: list[Chunk], block_size: int) -> NDArray[np.int32]:
    lengths = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(lengths)), dtype=np.int32)
    for row, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
        tables[row, :length] = chunk.request.block_table[:length]
    return tables
