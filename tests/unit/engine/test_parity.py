"""Greedy tokens of the built-in model equal those of transformers, however the work is cut."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvasir.engine.factory import build_engine
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.models.loader import load_model
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from tests.e2e import reference
from tests.unit.engine.forward import CPU, generate, greedy_request

pytestmark = pytest.mark.parity

NUM_TOKENS = 32
NAMES = [f"{length}-tokens" for length in (1, 15, 16, 17, 513)]
CUTS = [  # block size, chunk size, together
    (16, 2000, True),
    (16, 100, True),
    (8, 16, True),
    (32, 17, False),
    (5, 512, True),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    # Threads that wait for each other lose much time on a machine that is busy with other things.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    by_name = {prompt.name: prompt for prompt in reference.prompts(model_dir)}
    return [list(by_name[name].token_ids) for name in NAMES]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [list(reference.answers()[name].token_ids[:NUM_TOKENS]) for name in NAMES]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LlamaForCausalLM:
    return load_model(model_dir, read_model_config(model_dir), torch.float32, CPU)


@pytest.mark.parametrize(("block_size", "chunk_size", "together"), CUTS)
def test_equal_to_transformers(
    model: LlamaForCausalLM, prompts: list[list[int]], expected: list[list[int]],
    block_size: int, chunk_size: int, together: bool,
) -> None:  # fmt: skip
    requests: list[Request] = []
    for i, prompt in enumerate(prompts):
        first_block = sum(len(one.block_table) for one in requests)
        requests.append(greedy_request(f"r{i}", prompt, NUM_TOKENS, first_block, block_size))
    num_blocks = sum(len(one.block_table) for one in requests)
    kv_cache = KVCache(kv_layout(model.config, block_size, torch.float32), num_blocks, CPU)
    runner = ModelRunner(model, kv_cache, max_model_len=1024)
    for group in [requests] if together else [[one] for one in requests]:
        generate(runner, group, chunk_size)
    for request, tokens in zip(requests, expected, strict=True):
        assert request.output_token_ids == tokens, f"prompt of {len(request.prompt_token_ids)} tokens"


def test_through_the_engine(model_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Scheduler, prefix cache and model together: all at once, then once more with the prefixes cached."""
    settings = EngineSettings(
        model=str(model_dir), num_threads=1, max_model_len=1024, kv_cache_memory=80 << 20, max_num_batched_tokens=100
    )
    engine, kv_cache, info = build_engine(settings)
    assert kv_cache.layout == info.layout
    assert info.eos_token_ids == {0, 2}
    for attempt in range(2):
        requests = [
            Request(
                request_id=RequestId(f"{attempt}-{i}"),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=NUM_TOKENS),
            )
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            engine.submit(request)
        reasons = {
            output.request_id: output.finish_reason
            for result in iter(lambda: engine.step() if engine.has_work else None, None)
            for output in result.outputs
        }
        assert set(reasons.values()) == {FinishReason.LENGTH}
        assert [request.output_token_ids for request in requests] == expected
        cached = [request.num_cached_tokens for request in requests]
        assert cached == ([0] * len(requests) if attempt == 0 else [0, 0, 0, 16, 512])
        engine.check_invariants()
