"""Drives a model or a model runner without a scheduler: one request, chunks of given sizes."""

from pathlib import Path

import torch
from torch import Tensor

from kvasir.engine.batch import build_batch
from kvasir.engine.blocks import BlockId
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import Chunk, StepPlan

CPU = torch.device("cpu")


@torch.inference_mode()
def logits_by_chunks(directory: Path, token_ids: list[int], chunk_sizes: list[int], block_size: int = 4) -> Tensor:
    """[T, V], each chunk in a step of its own. The blocks lie backwards."""
    config = read_model_config(directory).for_length(len(token_ids))
    model = load_model(directory, config, torch.float32, CPU)
    num_blocks = -(-len(token_ids) // block_size)
    kv_cache = KVCache(kv_layout(config, block_size, torch.float32), num_blocks, CPU)
    tables = rope_tables(config.ropes, config.head_dim, len(token_ids))
    request = Request(
        request_id=RequestId("r"),
        prompt_token_ids=token_ids,
        block_table=[BlockId(i) for i in reversed(range(num_blocks))],
    )
    logits, start = [], 0
    for size in chunk_sizes:
        batch = build_batch([Chunk(request, start, size)], block_size, tables, CPU)
        logits.append(model.logits(model.forward(batch, kv_cache.data)))
        start += size
    assert start == len(token_ids)
    return torch.cat(logits)


def greedy_request(name: str, prompt: list[int], num_tokens: int, first_block: int, block_size: int) -> Request:
    num_blocks = -(-(len(prompt) + num_tokens) // block_size)
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=num_tokens),
        block_table=[BlockId(first_block + i) for i in range(num_blocks)],
    )


def generate(runner: ModelRunner, requests: list[Request], chunk_size: int) -> None:
    """Until each has its max_tokens; all of them in each step, prompts in chunks."""
    while True:
        chunks = [
            Chunk(one, one.num_computed_tokens, min(chunk_size, one.num_uncomputed_tokens))
            for one in requests
            if len(one.output_token_ids) < one.sampling.max_tokens
        ]
        if not chunks:
            return
        sampled = runner.execute(StepPlan(tuple(chunks)))
        for chunk in chunks:
            chunk.request.num_computed_tokens = chunk.end
            if chunk.samples:
                chunk.request.output_token_ids += sampled[chunk.request.request_id].token_ids
