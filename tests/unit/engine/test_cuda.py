"""The engine on a real GPU: layers of an 8B model's shape, few of them. Skipped where there is none."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kvasir.bench.lab.kernel_decode_step import EIGHT_B, decode_step, random_model
from kvasir.engine.blocks import BlockId
from kvasir.engine.cuda_graphs import CudaCapture, can_be_captured
from kvasir.engine.cuda_memory import kv_budget_bytes, profile_memory
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.step import Chunk, StepPlan
from kvasir.kernels import backend
from tests.unit.engine.forward import generate, greedy_request

BLOCK_SIZE, MAX_LEN, NUM_BLOCKS = 16, 1024, 512
FEW_LAYERS = {**EIGHT_B, "num_hidden_layers": 2}
CONFIG = LlamaForCausalLM.read_config(FEW_LAYERS)
TINY = {**FEW_LAYERS, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip


@pytest.fixture
def device() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("wants a CUDA GPU, and there is none")
    if backend.is_interpreted():
        pytest.skip("wants compiled kernels: TRITON_INTERPRET=0")
    yield torch.device("cuda", 0)
    backend.use("auto")
    torch.cuda.empty_cache()


def test_a_decode_step_of_the_bench_is_checked_on_a_cpu_too() -> None:
    prepared = decode_step(3, 21, "cpu", TINY)
    prepared.run()
    prepared.check()
    layer = 32 * (2 * 2 * 16 + 2 * 16 + 3 * 48)
    assert prepared.amount == 4 * (2 * layer + 64 * 32) + 3 * 21 * 2 * 2 * 16 * 4


def runner_on(
    device: torch.device, dtype: torch.dtype, captures: bool, num_drafts: int = 0
) -> tuple[ModelRunner, KVCache]:
    model = random_model(CONFIG, dtype, device)
    kv_cache = KVCache(kv_layout(CONFIG, BLOCK_SIZE, dtype), NUM_BLOCKS, device)
    runner = ModelRunner(model, kv_cache, MAX_LEN)
    if captures:
        assert can_be_captured(CONFIG, kv_cache.data)
        runner.capture_decodes(6, CudaCapture(), num_drafts)
    return runner, kv_cache


def outputs(runner: ModelRunner) -> list[list[int]]:
    requests = [
        greedy_request(str(i), list(range(9 * i + 1, 9 * i + 1 + length)), 24, 64 * i, BLOCK_SIZE)
        for i, length in enumerate([3, 250, 17, 64, 1])
    ]
    generate(runner, requests, chunk_size=100)
    return [request.output_token_ids for request in requests]


@pytest.mark.gpu
def test_triton_equals_torch(device: torch.device) -> None:
    """In float32, where greedy tokens leave no room for rounding to decide."""
    tokens = []
    for name in ("torch", "triton"):
        backend.use(name)  # type: ignore[arg-type]
        tokens.append(outputs(runner_on(device, torch.float32, captures=False)[0]))
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_replayed_steps_equal_the_others(device: torch.device) -> None:
    tokens = [outputs(runner_on(device, torch.float32, captures)[0]) for captures in (False, True)]
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_replayed_drafts_equal_the_others(device: torch.device) -> None:
    """Sequences with 0 to 3 drafts, of which the first are what the model would say."""
    found = []
    for captures in (False, True):
        runner, _ = runner_on(device, torch.float32, captures, num_drafts=3)
        prompts = [list(range(9 * i, 39 * i + 1)) for i in range(4)]
        requests = [greedy_request(str(i), prompt, 5, 64 * i, BLOCK_SIZE) for i, prompt in enumerate(prompts)]
        generate(runner, requests, chunk_size=100)
        for i, request in enumerate(requests):
            said = request.output_token_ids
            request.output_token_ids, request.draft_token_ids = said[:2], [*said[2:4], 7][:i]
        chunks = [Chunk(one, one.num_tokens - 1, 1 + i, i) for i, one in enumerate(requests)]
        found.append(runner.execute(StepPlan(tuple(chunks))))
        assert [len(sampled.token_ids) for sampled in found[-1].values()] == [1, 2, 3, 3]
    assert found[0] == found[1]


@pytest.mark.gpu
def test_blocks_travel_while_the_engine_computes(device: torch.device) -> None:
    """Threads write and read blocks that no request has; neither they nor the tokens are disturbed."""
    expected = outputs(runner_on(device, torch.float32, captures=True)[0])
    runner, kv_cache = runner_on(device, torch.float32, captures=True)
    size, wrong, stop = kv_cache.layout.bytes_per_block, [], threading.Event()

    def travel(thread: int) -> None:
        while not stop.is_set():
            for block in range(400 + 8 * thread, 408 + 8 * thread):
                payload = os.urandom(64) * (size // 64)
                kv_cache.write(BlockId(block), memoryview(payload))
                if bytes(kv_cache.read(BlockId(block))) != payload:
                    wrong.append(block)

    threads = [threading.Thread(target=travel, args=(i,), daemon=True) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        found = outputs(runner)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert found == expected
    assert not wrong


@pytest.mark.gpu
def test_a_block_that_was_written_is_what_the_next_step_sees(device: torch.device) -> None:
    """A prompt's blocks move to other places, and decoding goes on from there."""
    runner, kv_cache = runner_on(device, torch.float32, captures=True)
    stays, moves = (
        greedy_request(name, list(range(200)), 8, first, BLOCK_SIZE) for name, first in (("a", 0), ("b", 40))
    )
    generate(runner, [stays], chunk_size=200)
    for source, target in zip(stays.block_table, moves.block_table, strict=True):
        kv_cache.write(target, kv_cache.read(source))
    moves.num_computed_tokens = 199
    generate(runner, [moves], chunk_size=1)
    assert moves.output_token_ids == stays.output_token_ids


@pytest.mark.gpu
def test_the_profile_leaves_what_it_promises(device: torch.device) -> None:
    model = random_model(CONFIG, torch.bfloat16, device)
    layout = kv_layout(CONFIG, BLOCK_SIZE, torch.bfloat16)
    profile = profile_memory(model, layout, MAX_LEN, 512, 8, device)
    budget = kv_budget_bytes(profile, 0.5)
    assert profile.graph_bytes <= profile.peak_bytes < profile.total_bytes
    assert 0 < budget < profile.total_bytes // 2
