"""An engine put together from a directory, on tiny checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.engine.factory import build_engine, capacity_of
from kvasir.engine.models.unsupported import UnsupportedModel
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


@pytest.mark.parametrize(("kv_cache_dtype", "num_bytes"), [("fp16", 2 * 16), ("float16", 2 * 16), ("int8", 16 + 4)])
def test_a_kv_cache_in_fewer_bytes(tmp_path: Path, kv_cache_dtype: Any, num_bytes: int) -> None:
    """More blocks, the same identity, and nearly the same probabilities, in chunks and in decode steps."""
    model = save_checkpoint(tmp_path, initializer_range=0.1)
    prompt = list(range(3, 40))
    settings = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, max_num_batched_tokens=16)
    _, plain_cache, plain = build_engine(settings)
    settings = replace(settings, kv_cache_dtype=kv_cache_dtype)
    _, kv_cache, info = build_engine(settings)
    assert info.kv_identity == plain.kv_identity
    assert (info.dtype, info.layout.dtype) == ("float32", "int8" if kv_cache_dtype == "int8" else "float16")
    assert info.layout.bytes_per_block * 4 * info.layout.head_dim == plain.layout.bytes_per_block * num_bytes
    assert kv_cache.num_blocks > 1.9 * plain_cache.num_blocks
    results = run(tmp_path, settings, [request(prompt, max_tokens=2, logprobs=95)])
    outputs = [output for result in results for output in result.outputs]
    for number, output in enumerate(outputs):
        exact = reference_logits(model, prompt + [one.token_ids[0] for one in outputs[:number]])[-1].log_softmax(-1)
        for token, logprob in output.logprobs[0].entries:
            assert logprob == pytest.approx(float(exact[token]), abs=0.05)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"dtype": "float16", "kv_cache_dtype": "fp32"}]
)
def test_a_kv_cache_that_the_model_cannot_have(tmp_path: Path, options: dict[str, Any]) -> None:
    save_checkpoint(tmp_path)
    with pytest.raises(UnsupportedModel, match="for models computed in float32 on a CPU"):
        build_engine(EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, **options))


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


def test_activations_out_of_float16s_range_fail_the_request(tmp_path: Path) -> None:
    """A model made for bfloat16 once gave empty answers in float16."""
    save_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1e4
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    kept, lost = request([1, 7, 3], max_tokens=3), request([1, 7, 3], max_tokens=3)
    run(tmp_path, EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY), [kept])
    assert len(kept.output_token_ids) == 3
    results = run(tmp_path, EngineSettings(model=str(tmp_path), dtype="float16", kv_cache_memory=MEMORY), [lost])
    assert [type(failure.error).__name__ for result in results for failure in result.failed] == ["NumericalError"]


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


def test_a_length_that_fits_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(tmp_path)
    block = build_engine(EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, block_size=8))[2].layout
    settings = EngineSettings(
        model=str(tmp_path), kv_cache_memory=3 * block.bytes_per_block, block_size=8, max_model_len="auto"
    )
    with caplog.at_level("INFO"):
        engine, _, info = build_engine(settings)
    assert info.max_model_len == engine.scheduler.limits.max_model_len == 24
    assert "KV cache of 3 blocks: 24 tokens, 1.00 requests of 24 tokens" in caplog.text
    roomy = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, max_model_len="auto")
    assert build_engine(roomy)[2].max_model_len == 64, "no more than the model's"


def test_the_shortest_length(tmp_path: Path) -> None:
    """A token of a prompt and one more. What warms up the kernels was longer."""
    save_checkpoint(tmp_path)
    settings = EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, max_model_len=2)
    run(tmp_path, settings, [shortest := request([1], max_tokens=5)])
    assert len(shortest.output_token_ids) == 1


def test_capacity_in_words() -> None:
    assert capacity_of(100, 16, 400) == "KV cache of 100 blocks: 1,600 tokens, 4.00 requests of 400 tokens"


@pytest.mark.parametrize(
    ("role", "swap_space", "num_blocks"), [("decode", None, 10), ("decode", 0, 0), ("prefill", None, 0)]
)
def test_swap_space(tmp_path: Path, role: Any, swap_space: int | None, num_blocks: int) -> None:
    save_checkpoint(tmp_path)
    layout = build_engine(EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY))[2].layout
    settings = EngineSettings(
        model=str(tmp_path), role=role, kv_cache_memory=40 * layout.bytes_per_block, swap_space=swap_space
    )
    assert build_engine(settings)[0].scheduler.tables.swap.num_blocks == num_blocks


def test_a_swap_space_without_room_for_a_block_is_a_mistake(tmp_path: Path) -> None:
    """As by those who mean 4 GiB: it was silently none."""
    save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="swap_space of 4 bytes holds no block"):
        build_engine(EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, swap_space=4))


def test_swapped_requests_of_a_real_model_say_the_same(tmp_path: Path) -> None:
    """Bytes of real blocks go to the host and come back, the partial one too."""
    save_checkpoint(tmp_path, initializer_range=0.2)
    layout = build_engine(EngineSettings(model=str(tmp_path), kv_cache_memory=MEMORY, block_size=4))[2].layout
    prompts = {"a": list(range(3, 14)), "b": list(range(20, 33)), "c": list(range(40, 47))}

    def tokens(num_blocks: int, swap_space: int) -> tuple[dict[str, list[int]], int]:
        memory = num_blocks * layout.bytes_per_block
        settings = EngineSettings(
            model=str(tmp_path), kv_cache_memory=memory, block_size=4, watermark=0, swap_space=swap_space,
            enable_prefix_caching=False,
        )  # fmt: skip
        engine, _, _ = build_engine(settings)
        requests = [request(prompt, name, max_tokens=20) for name, prompt in prompts.items()]
        for one in requests:
            engine.submit(one)
        while engine.has_work:
            engine.step()
            engine.check_invariants()
        return {one.request_id: one.output_token_ids for one in requests}, engine.stats().num_swaps

    alone, _ = tokens(100, 0)
    swapped, num_swaps = tokens(12, MEMORY)
    assert swapped == alone
    assert num_swaps > 0
