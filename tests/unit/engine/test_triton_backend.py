"""A whole model on the Triton kernels, interpreted, equals the compiled loops: prefill in chunks, decodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.request import Request
from kvasir.kernels import backend
from tests.unit.engine.checkpoints import save_checkpoint
from tests.unit.engine.forward import CPU, generate, greedy_request, logits_by_chunks

PROMPTS = [[5, 9, 33, 7, 61, 2, 80, 14, 3], [4], [77, 76, 75, 74, 73, 72]]
NUM_TOKENS, BLOCK_SIZE = 4, 4
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def backend_as_before() -> Iterator[None]:
    yield
    backend.use("auto")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, "qwen3", **SMALL)  # with norms of queries and keys
    return directory


def runner_of(directory: Path) -> ModelRunner:
    config = read_model_config(directory)
    model = load_model(directory, config, torch.float32, CPU)
    return ModelRunner(model, KVCache(kv_layout(config, BLOCK_SIZE, torch.float32), 16, CPU), 32)


def outputs(runner: ModelRunner) -> list[list[int]]:
    requests: list[Request] = []
    for name, prompt in enumerate(PROMPTS):
        first_block = sum(len(request.block_table) for request in requests)
        requests.append(greedy_request(str(name), prompt, NUM_TOKENS, first_block, BLOCK_SIZE))
    generate(runner, requests, chunk_size=5)
    return [request.output_token_ids for request in requests]


def test_the_same_tokens(checkpoint: Path) -> None:
    expected = outputs(runner_of(checkpoint))
    backend.use("triton")
    assert outputs(runner_of(checkpoint)) == expected


def test_the_same_logits(checkpoint: Path) -> None:
    expected = logits_by_chunks(checkpoint, PROMPTS[0], [5, 3, 1])
    backend.use("triton")
    logits = logits_by_chunks(checkpoint, PROMPTS[0], [5, 3, 1])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
