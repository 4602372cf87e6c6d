"""Prompt lookup and draft models over real tensors: the same tokens as without, also under pressure and with forks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.common.speculative_config import SpeculativeConfig
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.settings import EngineSettings
from kvasir.engine.speculation.draft_model import DraftModel
from kvasir.engine.speculation.ngram import NgramProposer
from kvasir.engine.speculation.proposer import Proposer
from kvasir.engine.speculation.speculator import Speculator
from tests.unit.engine.checkpoints import VOCAB, save_checkpoint
from tests.unit.engine.drafting import Always
from tests.unit.engine.forward import CPU

LIMITS = Limits(block_size=4, num_blocks=200, max_num_batched_tokens=48, max_num_seqs=8, max_model_len=64)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    save_checkpoint(directory)
    return directory


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller, of another architecture, and seldom of the same opinion."""
    directory = tmp_path_factory.mktemp("stranger")
    save_checkpoint(directory, "qwen2", num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    return directory


def runner_of(directory: Path, num_blocks: int) -> ModelRunner:
    config = read_model_config(directory)
    kv_cache = KVCache(kv_layout(config, 4, torch.float32), num_blocks, CPU)
    return ModelRunner(load_model(directory, config, torch.float32, CPU), kv_cache, max_model_len=64)


def drafts_by(directory: Path, *, num_blocks: int = 200, budget: int = 48, max_model_len: int = 64) -> DraftModel:
    limits = replace(LIMITS, num_blocks=num_blocks, max_num_batched_tokens=budget, max_model_len=max_model_len)
    return DraftModel(runner_of(directory, num_blocks), limits)


def engine_of(target: Path, proposer: Proposer | None, num_blocks: int = 200) -> Engine:
    scheduler = Scheduler(replace(LIMITS, num_blocks=num_blocks))
    speculator = Speculator(proposer, scheduler, 4, Always()) if proposer else None
    return Engine(scheduler, runner_of(target, num_blocks), speculator=speculator)


def requests() -> list[Request]:
    """Some repeat themselves in the prompt; some are greedy, some are not."""
    prompts = [
        [(7 * i + 3) % VOCAB for i in range(35)],
        [5, 9, 33, 2, 71, 4] * 5,
        [11],
        [(7 * i + 3) % VOCAB for i in range(35)],
        [(i * i) % VOCAB for i in range(17)],
    ]
    sampling = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.4, seed=3),
        SamplingParams(max_tokens=20, temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.1),
        SamplingParams(max_tokens=24, temperature=0.7, seed=5, top_k=8),
        SamplingParams(max_tokens=9, presence_penalty=0.5, min_tokens=4, stop_token_ids=frozenset(range(40))),
    ]
    return [
        Request(request_id=RequestId(f"r{i}"), prompt_token_ids=prompt, sampling=params)
        for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]


def run(engine: Engine, every: list[Request]) -> list[list[int]]:
    for request in every:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        if engine.speculator is not None and isinstance(engine.speculator._proposer, DraftModel):
            engine.speculator._proposer.check_invariant()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return [one.output_token_ids for request in every for one in (request, *request.forks)]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    return run(engine_of(target, None), requests())


def test_prompt_lookup(target: Path, expected: list[list[int]]) -> None:
    engine = engine_of(target, NgramProposer(1, 3))
    assert run(engine, requests()) == expected
    assert engine.stats().num_accepted_tokens > 0


def test_a_draft_model_of_the_same_opinion(target: Path, expected: list[list[int]]) -> None:
    """By its own greedy choice, and by the draws of the request's own random numbers, penalties included."""
    engine = engine_of(target, drafts_by(target))
    assert run(engine, requests()) == expected
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens
    assert stats.step < 14


def test_a_draft_model_of_other_opinions(target: Path, stranger: Path, expected: list[list[int]]) -> None:
    engine = engine_of(target, drafts_by(stranger))
    assert run(engine, requests()) == expected
    stats = engine.stats()
    assert stats.num_accepted_tokens < 0.3 * stats.num_draft_tokens


@pytest.mark.parametrize(
    "little", [{"num_blocks": 14}, {"num_blocks": 3}, {"budget": 5}, {"max_model_len": 40}], ids=lambda one: str(one)
)
def test_a_draft_model_with_little_room(target: Path, expected: list[list[int]], little: dict[str, int]) -> None:
    """Requests take turns, prompts come in pieces, and long ones get no drafts."""
    engine = engine_of(target, drafts_by(target, **little))
    assert run(engine, requests()) == expected
    assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_under_pressure(target: Path, expected: list[list[int]], kind: str) -> None:
    proposer = NgramProposer(1, 3) if kind == "lookup" else drafts_by(target, num_blocks=30)
    engine = engine_of(target, proposer, num_blocks=26)
    assert run(engine, requests()) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_several_sequences_of_one_prompt(target: Path, kind: str) -> None:
    def family() -> list[Request]:
        params = [SamplingParams(max_tokens=16, temperature=0.8, seed=seed) for seed in range(4)]
        prompt = [5, 9, 33, 2, 71, 4] * 5
        one, *others = (
            Request(request_id=RequestId(f"s{i}"), prompt_token_ids=prompt, sampling=each)
            for i, each in enumerate(params)
        )
        one.forks = others
        return [one]

    def tokens(engine: Engine) -> list[list[int]]:
        (one,) = every = family()
        forks = list(one.forks)
        run(engine, every)
        return [one.output_token_ids, *(fork.output_token_ids for fork in forks)]

    engine = engine_of(target, NgramProposer(1, 3) if kind == "lookup" else drafts_by(target))
    assert tokens(engine) == tokens(engine_of(target, None))
    assert engine.stats().num_accepted_tokens > 0
    assert engine.stats().num_prompt_tokens_computed == 30


def test_a_cancelled_request_leaves_nothing_with_the_draft_model(target: Path) -> None:
    draft = drafts_by(target)
    engine = engine_of(target, draft)
    first, *others = requests()
    for request in (first, *others):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    for request in others:
        engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()
        draft.check_invariant()
    assert list(draft._shadows) == [first.request_id]
    again = Request(request_id=RequestId("next"), prompt_token_ids=[3, 4], sampling=SamplingParams(max_tokens=5))
    run(engine, [again])
    assert list(draft._shadows) == ["next"], "those that have ended are forgotten"


def test_from_settings(target: Path, stranger: Path, expected: list[list[int]]) -> None:
    """Both caches have as many blocks; what the drafts pay decides how many there are."""
    settings = EngineSettings(model=str(target), num_threads=1, block_size=4, kv_cache_memory=2 << 20)
    _, alone, _ = build_engine(settings)
    configs = [
        SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3),
        SpeculativeConfig(model=stranger, num_speculative_tokens=2),
    ]
    for config in configs:
        engine, kv_cache, _ = build_engine(replace(settings, speculation=config))
        assert run(engine, requests()) == expected
        assert engine.stats().num_draft_tokens > 0
        if config.model is None:
            assert kv_cache.num_blocks == alone.num_blocks
        else:
            assert isinstance(engine.speculator, Speculator)
            assert isinstance(engine.speculator._proposer, DraftModel)
            assert kv_cache.num_blocks < 0.9 * alone.num_blocks


def test_a_draft_model_with_other_tokens_is_refused(target: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, vocab_size=VOCAB + 1)
    settings = EngineSettings(model=str(target), kv_cache_memory=2 << 20)

    def build(directory: Path) -> Any:
        return build_engine(replace(settings, speculation=SpeculativeConfig(model=directory, num_speculative_tokens=2)))

    with pytest.raises(UnsupportedModel, match="knows 97 tokens, the model 96"):
        build(tmp_path)
    with pytest.raises(UnsupportedModel, match="config"):
        build(tmp_path / "nothing")
    save_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(UnsupportedModel, match="another tokenizer"):
        build(tmp_path)
