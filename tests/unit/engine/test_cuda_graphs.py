"""Decode batches padded up to captured sizes, on a CPU: the capture simply calls the function again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs, HostBatch, host_batch
from kvasir.engine.blocks import BlockId
from kvasir.engine.cuda_graphs import DecodeGraphs, captured_sizes
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk, StepPlan
from kvasir.kernels import backend
from tests.unit.engine.checkpoints import save_checkpoint
from tests.unit.engine.forward import CPU, generate, greedy_request

BLOCK_SIZE = 4
TABLE = torch.arange(20.0)[:, None].repeat(1, 2), -torch.arange(20.0)[:, None].repeat(1, 2)


def test_sizes() -> None:
    assert captured_sizes(1) == [1]
    assert captured_sizes(3) == [1, 2, 3]
    assert captured_sizes(8) == [1, 2, 4, 8]
    assert captured_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert captured_sizes(300)[-4:] == [256, 272, 288, 300]
    assert captured_sizes(4096)[-1] == 512


class Calls:
    """A capture, and a model that says what it was given."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.seen: list[BatchInputs] = []

    def forward(self, batch: BatchInputs) -> Tensor:
        self.seen.append(batch)
        return batch.token_ids[:, None].float()

    def capture(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captured.append(len(function()))
        return function


def decodes(*contexts: int, num_tokens: int = 1) -> HostBatch:
    """Sequence i has token i + 1 next, and its own two blocks."""
    chunks = []
    for i, context in enumerate(contexts):
        blocks = [BlockId(2 * i), BlockId(2 * i + 1)]
        prompt = [i + 1] * (context + num_tokens)
        request = Request(request_id=RequestId(str(i)), prompt_token_ids=prompt, block_table=blocks)
        chunks.append(Chunk(request, context, num_tokens))
    return host_batch(chunks, BLOCK_SIZE)


def test_a_batch_is_padded_and_copied_to_where_the_graph_reads() -> None:
    calls = Calls()
    graphs = DecodeGraphs(calls.forward, [TABLE], [1, 2, 4], 5, CPU, calls.capture)
    assert calls.captured == [4, 2, 1]
    places = {len(batch.token_ids): batch.block_tables.data_ptr() for batch in calls.seen}
    for contexts in ((1, 6, 3, 2), (5, 1, 7)):  # the second must not find the fourth row of the first
        host = decodes(*contexts)
        assert graphs.shape_for(host) == (4, 1)
        hidden = graphs.run(host.padded(4).on_device([TABLE], CPU))
        seen, num_padding = calls.seen[-1], 4 - len(contexts)
        assert hidden[: len(contexts), 0].tolist() == list(range(1, len(contexts) + 1))
        assert seen.num_decodes == 4
        assert seen.block_tables.shape == (4, 5)
        assert seen.block_tables.data_ptr() == places[4]
        assert seen.seq_lens.tolist() == [context + 1 for context in contexts] + [0] * num_padding
        slots = [8 * i + context for i, context in enumerate(contexts)]
        assert seen.slot_mapping.tolist() == slots + [-1] * num_padding
        for i, context in enumerate(contexts):
            assert seen.block_tables[i, : context // 4 + 1].tolist() == [2 * i, 2 * i + 1][: context // 4 + 1]
        assert seen.ropes[0][0][: len(contexts), 0].tolist() == list(contexts)
        assert seen.ropes[0][1][: len(contexts), 1].tolist() == [-context for context in contexts]


def test_what_is_not_replayed() -> None:
    calls = Calls()
    graphs = DecodeGraphs(calls.forward, [TABLE], [1, 2, 4], 5, CPU, calls.capture)
    shapes = [graphs.shape_for(decodes(*[1] * n)) for n in (1, 2, 3, 4, 5)]
    assert shapes == [(1, 1), (2, 1), (4, 1), (4, 1), None]
    assert graphs.shape_for(decodes(1, num_tokens=2)) is None
    drafting = DecodeGraphs(calls.forward, [TABLE], [1, 2, 4], 5, CPU, calls.capture, 3)
    assert [drafting.shape_for(decodes(1, num_tokens=n)) for n in (1, 2, 3, 4)] == [(1, 1), (1, 3), (1, 3), None]
    assert drafting.shape_for(replace(decodes(1, num_tokens=2), is_scored=True)) is None
    assert drafting.shape_for(replace(decodes(1), is_scored=True)) == (1, 1), "no row moves"


def test_tokens_of_drafting_sequences_are_their_last_ones() -> None:
    one, two, three = (
        Request(
            request_id=RequestId(str(i)), prompt_token_ids=[10 * i + j for j in range(6)],
            block_table=[BlockId(2 * i), BlockId(2 * i + 1)],
        )
        for i in range(3)
    )  # fmt: skip
    host = host_batch([Chunk(one, 5, 1), Chunk(two, 3, 3), Chunk(three, 4, 2)], BLOCK_SIZE).padded(4, 3)
    assert host.token_ids.tolist() == [0, 0, 5, 13, 14, 15, 0, 24, 25, 0, 0, 0]
    assert host.positions.tolist() == [0, 0, 5, 3, 4, 5, 0, 4, 5, 0, 0, 0]
    assert host.slot_mapping.tolist() == [-1, -1, 5, 11, 12, 13, -1, 20, 21, -1, -1, -1]
    assert host.seq_lens.tolist() == [6, 6, 6, 0]
    assert host.sampled_tokens.tolist() == [2, 5, 8]
    assert (host.num_decodes, host.tokens_each, len(host.block_tables)) == (4, 3, 4)
    calls = Calls()
    graphs = DecodeGraphs(calls.forward, [TABLE], [2, 4], 5, CPU, calls.capture, 3)
    assert calls.captured == [12, 6, 4, 2]
    assert graphs.run(host.on_device([TABLE], CPU))[:, 0].tolist() == host.token_ids.tolist()
    assert calls.seen[-1].tokens_each == 3


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_replayed_steps_equal_the_others(tmp_path: Path, kind: str) -> None:
    """Gemma 3 has two rotations. Three requests that end one after the other: 3 (padded to 4), 2, 1."""
    save_checkpoint(tmp_path, kind)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    results = []
    for is_captured in (False, True):
        kv_cache = KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 24, CPU)
        runner = ModelRunner(model, kv_cache, 32)
        replayed: list[int] = []
        if is_captured:
            runner.capture_decodes(4, counting(replayed))
        requests = [
            greedy_request(str(i), prompt, num_tokens, 8 * i, BLOCK_SIZE)
            for i, (prompt, num_tokens) in enumerate([([5, 9, 33, 7], 4), ([4], 7), ([77, 76], 9)])
        ]
        generate(runner, requests, chunk_size=6)
        results.append(([request.output_token_ids for request in requests], kv_cache.data))
        assert replayed == ([4, 4, 4, 2, 2, 2, 1, 1] if is_captured else [])
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend_name", ["auto", "triton"])
def test_replayed_drafts_equal_the_others(tmp_path: Path, backend_name: backend.Backend) -> None:
    """Sequences with 0, 1 and 2 drafts, and one that is shorter than its row of tokens; padded to 4 of 3 tokens."""
    save_checkpoint(tmp_path, "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    results = []
    backend.use(backend_name)
    try:
        for is_captured in (False, True):
            kv_cache = KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 24, CPU)
            runner, replayed = ModelRunner(model, kv_cache, 32), list[int]()
            if is_captured:
                runner.capture_decodes(4, counting(replayed), num_drafts=2)
            prompts = [[5, 9, 33, 7], [4], [77, 76, 60, 1, 2]]
            requests = [greedy_request(str(i), prompt, 1, 8 * i, BLOCK_SIZE) for i, prompt in enumerate(prompts)]
            generate(runner, requests, chunk_size=6)
            replayed.clear()
            for request, drafts in zip(requests, ([], [50], [61, 62]), strict=True):
                request.draft_token_ids = drafts
            chunks = [Chunk(one, one.num_tokens - 1, 1 + i, i) for i, one in enumerate(requests)]
            results.append((runner.execute(StepPlan(tuple(chunks))), kv_cache.data))
            assert replayed == ([12] if is_captured else [])
    finally:
        backend.use("auto")
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5)


def counting(replayed: list[int]) -> Callable[[Callable[[], Tensor]], Callable[[], Tensor]]:
    def capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def replay() -> Tensor:
            hidden = function()
            replayed.append(len(hidden))
            return hidden

        return replay

    return capture
