"""How much of a GPU's memory is left for KV: told by the largest step, run once before there is a cache.

|<------------------------- the GPU's memory ------------------------->|
|<-------------------- x gpu_memory_utilization ----------------->|
| others | weights and the largest step | graphs |       KV       |
"""

from dataclasses import dataclass

import torch

from kvasir.engine.blocks import BlockId, KVLayout, num_blocks_for
from kvasir.engine.forward_pass import Model
from kvasir.engine.kv_cache import KVCache
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Chunk, StepPlan


class NoRoomForKV(ValueError):
    """The message says what takes the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    total_bytes: int
    free_bytes: int  # after the largest step, and after torch has given back what it no longer needs
    reserved_bytes: int  # by torch in this process, at the same moment
    peak_bytes: int  # most that tensors took at once in the largest step, weights included
    graph_bytes: int  # most that tensors took in the largest decode step beyond the weights: the graphs' own


def kv_budget_bytes(profile: MemoryProfile, gpu_memory_utilization: float) -> int:
    """Raises NoRoomForKV if nothing is left."""
    others = max(profile.total_bytes - profile.free_bytes - profile.reserved_bytes, 0)
    usable = int(profile.total_bytes * gpu_memory_utilization)
    budget = usable - others - profile.peak_bytes - profile.graph_bytes
    if budget <= 0:
        raise NoRoomForKV(
            f"gpu_memory_utilization {gpu_memory_utilization} allows {usable:,} bytes, and there is no room for KV: "
            f"weights and the largest step take {profile.peak_bytes:,}, decode graphs {profile.graph_bytes:,}, "
            f"others {others:,}"
        )
    return budget


def largest_step(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> StepPlan:
    """As many tokens, and as many sequences that sample, as a step may have; all in block 0, one over the other.

    One of them asks for all that takes memory: logprobs of its prompt, penalties over the whole vocabulary.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(max_num_batched_tokens, num_seqs * max_model_len)
    shares = [num_tokens // num_seqs + (i < num_tokens % num_seqs) for i in range(num_seqs)]
    demanding = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1, prompt_logprobs=1)
    plain = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)
    requests = [_request(share, block_size, plain if i else demanding, str(i)) for i, share in enumerate(shares)]
    return StepPlan(tuple(Chunk(request, 0, request.num_tokens) for request in requests))


def largest_decode(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, tokens_each: int = 1
) -> StepPlan:
    """tokens_each: with the drafts of each sequence, as far as its length allows them"""
    num_seqs, tokens_each = min(max_num_seqs, max_num_batched_tokens), min(tokens_each, max_model_len)
    requests = [_request(tokens_each, block_size, SamplingParams(), str(i)) for i in range(num_seqs)]
    return StepPlan(tuple(Chunk(request, 0, tokens_each) for request in requests))


def _request(num_tokens: int, block_size: int, sampling: SamplingParams, name: str) -> Request:
    blocks = [BlockId(0)] * num_blocks_for(num_tokens, block_size)
    return Request(request_id=RequestId(name), prompt_token_ids=[0] * num_tokens, sampling=sampling, block_table=blocks)


def profile_memory(
    model: Model, layout: KVLayout, max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int,
    device: torch.device, num_drafts: int = 0,
) -> MemoryProfile:  # fmt: skip
    """Runs two steps on a cache of one block; takes as long as the kernels take to compile."""
    runner = ModelRunner(model, KVCache(layout, 1, device), max_model_len)
    block_size = layout.block_size
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(largest_step(max_num_batched_tokens, max_num_seqs, max_model_len, block_size))
    peak_bytes = torch.cuda.max_memory_allocated(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(largest_decode(max_num_batched_tokens, max_num_seqs, max_model_len, block_size, 1 + num_drafts))
    graph_bytes = torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryProfile(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        reserved_bytes=torch.cuda.memory_reserved(device),
        peak_bytes=peak_bytes,
        graph_bytes=graph_bytes,
    )
