"""A step's plan as tensors: the tokens of all requests end to end, without padding, decodes first.

chunks      | d0 | d1 | d2 |  prefill p0  |    prefill p1    |
tokens      | .  | .  | .  | .  .  .  .   | .  .  .  .  .  . |      T
sequences     0    1    2         3                4                S
query_starts                0              4                  10     of the prefills alone
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir.engine.models.rope import RopeTable
from kvasir.engine.step import Chunk, StepPlan

# Shapes: T tokens in this step  S sequences  P sequences with more than one token  M blocks of the longest
#   D head dim, or as much of it as is rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """What one forward pass needs, already on the device. Built once, read by every layer."""

    num_decodes: int  # the first so many tokens are one sequence each
    token_ids: Tensor  # [T] int64
    ropes: tuple[RopeTable, ...]  # cos and sin [T, D / 2] of each token's position; for each rotation of the model
    slot_mapping: Tensor  # [T] int64, where each token's keys and values are written
    block_tables: Tensor  # [S, M] int32, padded with 0
    seq_lens: Tensor  # [S] int32, context length after this step
    query_starts: Tensor  # [P + 1] int32, of the tokens after the decodes
    sampled_tokens: Tensor  # [R] int64, the indices of the tokens whose logits are sampled from, in order


def decodes_first(plan: StepPlan) -> list[Chunk]:
    """The order in which `build_batch` wants the chunks."""
    return sorted(plan.chunks, key=lambda chunk: chunk.num_tokens > 1)


def build_batch(
    chunks: list[Chunk], block_size: int, rope_tables: Sequence[RopeTable], device: torch.device
) -> BatchInputs:
    num_tokens = np.array([chunk.num_tokens for chunk in chunks])
    starts = np.array([chunk.start for chunk in chunks])
    ends_in_batch = np.cumsum(num_tokens)
    sequence = np.repeat(np.arange(len(chunks)), num_tokens)  # [T]
    positions = np.arange(ends_in_batch[-1]) - (ends_in_batch - num_tokens - starts)[sequence]
    block_tables = _block_tables(chunks, block_size)
    slots = block_tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_decodes = int((num_tokens == 1).sum())
    query_starts = np.concatenate(([0], np.cumsum(num_tokens[num_decodes:])))

    def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device, dtype)

    at = on_device(positions, torch.int64)
    return BatchInputs(
        num_decodes=num_decodes,
        token_ids=on_device(_token_ids(chunks), torch.int64),
        ropes=tuple((cos[at], sin[at]) for cos, sin in rope_tables),
        slot_mapping=on_device(slots, torch.int64),
        block_tables=on_device(block_tables, torch.int32),
        seq_lens=on_device(starts + num_tokens, torch.int32),
        query_starts=on_device(query_starts, torch.int32),
        sampled_tokens=on_device(_sampled_tokens(chunks, ends_in_batch.tolist()), torch.int64),
    )


def _token_ids(chunks: list[Chunk]) -> np.ndarray:
    ids: list[int] = []
    for chunk in chunks:
        ids += tokens_between(chunk, chunk.start, chunk.end)
    return np.array(ids)


def tokens_between(chunk: Chunk, start: int, end: int) -> list[int]:
    """Tokens [start, end) of the request: prompt, then outputs, then drafts."""
    request = chunk.request
    border = len(request.prompt_token_ids)
    if start < border:
        tokens = request.prompt_token_ids[start:end] + request.output_token_ids[: max(end - border, 0)]
    else:
        tokens = request.output_token_ids[start - border : end - border]
    return tokens + request.draft_token_ids[: end - start - len(tokens)]


def _sampled_tokens(chunks: list[Chunk], ends_in_batch: list[int]) -> np.ndarray:
    """The last token of each chunk that gives a next token, and those before its drafts."""
    indices: list[int] = []
    for chunk, end in zip(chunks, ends_in_batch, strict=True):
        if chunk.samplers:
            indices += range(end - 1 - chunk.num_drafts, end)
    return np.array(indices, dtype=np.int64)


def _block_tables(chunks: list[Chunk], block_size: int) -> np.ndarray:
    lengths = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(lengths)), dtype=np.int32)
    for row, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
        tables[row, :length] = chunk.request.block_table[:length]
    return tables
