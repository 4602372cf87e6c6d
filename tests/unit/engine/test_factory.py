"""An engine put together from a directory, on tiny checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.engine.factory import build_engine
from kvasir.engine.models.config import UnsupportedModel
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from kvasir.engine.step import StepResult
from tests.unit.engine.checkpoints import edit_json, reference_logits, save_checkpoint

MEMORY = 4 << 20


def run(directory: Path, settings: EngineSettings, requests: list[Request]) -> list[StepResult]:
    engine, _, _ = build_engine(settings)
    for request in requests:
        engine.submit(request)
    results = []
    while engine.has_work:
        results.append(engine.step())
    engine.check_invariants()
    return results


def request(prompt: list[int], name: str = "r", **params: Any) -> Request:
    return Request(request_id=RequestId(name), prompt_token_ids=prompt, sampling=SamplingParams(**params))


def test_info(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3")
    settings = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, block_size=8)
    engine, kv_cache, info = build_engine(settings)
    assert (info.name, info.vocab_size, info.max_model_len, info.dtype) == (tmp_path.name, 96, 64, "float32")
    assert info.layout.bytes_per_block == 2 * 3 * 2 * 8 * 16 * 4
    assert kv_cache.num_blocks == MEMORY // info.layout.bytes_per_block
    assert engine.stats().num_free_blocks == kv_cache.num_blocks
    _, _, other = build_engine(EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, block_size=16))
    assert other.kv_identity != info.kv_identity


def test_longer_than_the_model_allows(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    settings = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, max_model_len=257)
    with pytest.raises(UnsupportedModel, match=r"257 is more than the 256 positions .*dynamic"):
        build_engine(settings)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_by_choice(tmp_path: Path, dtype: str) -> None:
    """Through the torch references, since the compiled loops are float32: close to float32, not equal."""
    model = save_checkpoint(tmp_path, initializer_range=0.1)
    prompt = list(range(3, 40))
    settings = EngineSettings(model=str(tmp_path), dtype=dtype, kv_cache_memory=MEMORY, max_num_batched_tokens=16)
    results = run(tmp_path, settings, [request(prompt, max_tokens=2, logprobs=95)])
    (first, *_) = [output for result in results for output in result.outputs]
    exact = reference_logits(model, prompt)[-1].log_softmax(-1)
    for token, logprob in first.logprobs[0].entries:
        assert logprob == pytest.approx(float(exact[token]), abs=0.15)


def test_weights_out_of_range_fail_the_request_and_not_the_engine(tmp_path: Path) -> None:
    """A layer of infinities once gave endless '!!!!': the request must end with an error."""
    save_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY)
    broken, healthy = request([1, 7, 3], "broken", max_tokens=3), request([1, 5, 3], "healthy", max_tokens=3)
    results = run(tmp_path, settings, [broken, healthy])
    failed = [failure for result in results for failure in result.failed]
    assert [(failure.request_id, type(failure.error).__name__) for failure in failed] == [("broken", "NumericalError")]
    assert len(healthy.output_token_ids) == 3


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    settings = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, max_num_batched_tokens=20)

    def rows() -> list[Request]:
        return [
            request([1 + i] * (5 + 7 * i), f"r{i}", temperature=0.8, seed=40 + i % 2, max_tokens=12) for i in range(5)
        ]

    together = rows()
    run(tmp_path, settings, together)
    alone = rows()
    for one in alone:
        run(tmp_path, settings, [one])
    assert [one.output_token_ids for one in together] == [one.output_token_ids for one in alone]
    assert len({tuple(one.output_token_ids) for one in together}) == 5
