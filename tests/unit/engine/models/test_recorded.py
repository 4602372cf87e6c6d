"""Steps from a recording equal those run loop by loop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.engine.batch import BatchInputs, build_batch
from kvasir.engine.blocks import BlockId
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.recorded import RecordedLayers
from kvasir.engine.models.rope import rope_tables
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk
from tests.unit.engine.checkpoints import save_checkpoint
from tests.unit.engine.forward import CPU

BLOCK_SIZE, BLOCKS_A_SEQUENCE = 4, 12
STEPS = [(1, 3), (1, 4), (3, 7), (1, 40), (3, 8), (5, 17), (3, 46), (1, 3)]  # sequences, tokens before this one


@pytest.mark.parametrize(
    ("kind", "is_recordable"), [("llama", True), ("phi3", True), ("mistral", True), ("mixtral", False)]
)
@torch.inference_mode()
def test_recorded_steps_equal_the_others(tmp_path: Path, kind: str, is_recordable: bool) -> None:
    save_checkpoint(tmp_path, kind)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    tables = rope_tables(config.ropes, config.head_dim, 64)
    filled = torch.randn(KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 5 * BLOCKS_A_SEQUENCE, CPU).data.shape)
    caches = filled.clone(), filled.clone()
    for num_seqs, context in STEPS:
        batch = build_batch([_next_token(s, context) for s in range(num_seqs)], BLOCK_SIZE, tables, CPU)
        residual = torch.randn(num_seqs, config.hidden_size)
        plain = behind_layers(model, residual, batch, caches[0])
        assert torch.equal(plain, model._recorded(residual, batch, caches[1]))
        assert torch.equal(*caches)
    widths = {1, 2, 4, 8, 16}  # of block tables, rounded up: one recording each, with room for 8 sequences
    assert model._recorded.num_recorded == (len(widths) if is_recordable else 0)


SIZES = [1, 5, 9, 3, 16, 17, 1, 33, 64, 2, 65, 31, 8]  # rooms: 8, 16, 32, 64; no more than 64 sequences are recorded


@torch.inference_mode()
def test_a_batch_of_any_size_runs_from_what_was_recorded(tmp_path: Path) -> None:
    """Batches change with each request that comes or goes; a recording for each size took as long as a step."""
    save_checkpoint(tmp_path, "llama")
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    tables = rope_tables(config.ropes, config.head_dim, 64)
    filled = torch.randn(KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 65 * BLOCKS_A_SEQUENCE, CPU).data.shape)
    caches = filled.clone(), filled.clone()
    for _ in range(2):
        for num_seqs in SIZES:
            chunks = [_next_token(s, 9 + s % 7) for s in range(num_seqs)]
            batch = build_batch(chunks, BLOCK_SIZE, tables, CPU)
            residual = torch.randn(num_seqs, config.hidden_size)
            plain = behind_layers(model, residual, batch, caches[0])
            assert torch.equal(plain, model._recorded(residual, batch, caches[1]))
            assert torch.equal(*caches)
        assert model._recorded.num_recorded == 4


# (tokens before, new ones) of each prompt. Rooms: 8, 32, 16, 64, and 512; the last is too large
PROMPTS = [
    [(0, 5)], [(0, 19), (3, 2)], [(8, 6), (0, 2), (30, 3)], [(0, 46)], [(0, 30), (7, 30), (9, 2)], [(0, 5)],
    [(2, 40)] * 12, [(0, 40)] * 13,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "phi3", "mistral"])
@torch.inference_mode()
def test_prompts_run_from_what_was_recorded(tmp_path: Path, kind: str) -> None:
    """Those of any number and length; what is there of sequences from a step before has no tokens in this one."""
    save_checkpoint(tmp_path, kind)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    tables = rope_tables(config.ropes, config.head_dim, 64)
    filled = torch.randn(KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 13 * BLOCKS_A_SEQUENCE, CPU).data.shape)
    caches = filled.clone(), filled.clone()
    nums_recorded = []
    for prompts in PROMPTS:
        chunks = [_tokens(s, context, num_new) for s, (context, num_new) in enumerate(prompts)]
        batch = build_batch(chunks, BLOCK_SIZE, tables, CPU)
        residual = torch.randn(len(batch.token_ids), config.hidden_size)
        plain = behind_layers(model, residual, batch, caches[0])
        assert torch.equal(plain, model._recorded(residual, batch, caches[1]))
        assert torch.equal(*caches)
        nums_recorded.append(model._recorded.num_recorded)
    assert nums_recorded == [1, 2, 3, 4, 4, 4, 5, 5]


@torch.inference_mode()
def test_another_cache_at_the_same_place_is_another_recording(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU)
    tables = rope_tables(config.ropes, config.head_dim, 64)
    cache = torch.randn(KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 2 * BLOCKS_A_SEQUENCE, CPU).data.shape)
    for block_size in (BLOCK_SIZE, 2 * BLOCK_SIZE):
        shape = (-1, *cache.shape[1:4], block_size, config.head_dim)
        batch = build_batch([_next_token(0, 6)], block_size, tables, CPU)
        residual = torch.randn(1, config.hidden_size)
        batch = replace(batch, block_tables=batch.block_tables.new_tensor([[0, 1]]))  # as wide for both
        plain = behind_layers(model, residual, batch, cache.clone().view(shape))
        assert torch.equal(plain, model._recorded(residual, batch, cache.view(shape)))


@torch.inference_mode()
def test_layers_that_call_torch_run_as_they_are(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    config = read_model_config(tmp_path)
    batch = build_batch([_next_token(0, 3)], BLOCK_SIZE, rope_tables(config.ropes, config.head_dim, 64), CPU)
    layers = RecordedLayers(lambda hidden, residual, batch, kv_cache: residual * 2)
    for _ in range(2):
        residual = torch.randn(1, 8)
        assert torch.equal(layers(residual.clone(), batch, torch.zeros(1)), residual * 3)
    assert layers.num_recorded == 0


def behind_layers(model: Any, residual: torch.Tensor, batch: BatchInputs, cache: torch.Tensor) -> torch.Tensor:
    """Loop by loop."""
    residual = residual.clone()
    hidden: torch.Tensor = model._through_layers(torch.zeros_like(residual), residual, batch, cache)
    return residual + hidden


def _next_token(s: int, context: int) -> Chunk:
    return _tokens(s, context, 1)


def _tokens(s: int, context: int, num_new: int) -> Chunk:
    request = Request(
        request_id=RequestId(str(s)), prompt_token_ids=[7] * (context + num_new),
        block_table=[BlockId(s * BLOCKS_A_SEQUENCE + i) for i in range(BLOCKS_A_SEQUENCE)],
    )  # fmt: skip
    return Chunk(request, context, num_new)
