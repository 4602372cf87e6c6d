"""Forks and scores with real tensors: equal to what one sequence alone gives, and to transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.engine.engine import Engine
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import PositionLogprobs, StepResult
from tests.unit.engine.checkpoints import VOCAB, reference_logits, save_checkpoint
from tests.unit.engine.forward import CPU

PROMPT = [(7 * i + 3) % VOCAB for i in range(39)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("model")
    return directory, save_checkpoint(directory)


def make_engine(directory: Path, *, budget: int = 64, num_blocks: int = 64) -> Engine:
    config = read_model_config(directory)
    kv_cache = KVCache(kv_layout(config, 4, torch.float32), num_blocks, CPU)
    runner = ModelRunner(load_model(directory, config, torch.float32, CPU), kv_cache, max_model_len=64)
    limits = Limits(
        block_size=4, num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=8, max_model_len=64
    )
    return Engine(Scheduler(limits), runner)


def run(engine: Engine, *requests: Request) -> list[StepResult]:
    for request in requests:
        engine.submit(request)
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return results


def sampled(seed: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=12, seed=seed, temperature=temperature, logprobs=2)


def request(name: str, sampling: SamplingParams, length: int = 39, **fields: Any) -> Request:
    return Request(request_id=RequestId(name), prompt_token_ids=PROMPT[:length], sampling=sampling, **fields)


@pytest.mark.parametrize("length", [36, 37, 39])
@pytest.mark.parametrize("budget", [64, 5])
def test_a_fork_says_what_it_would_say_alone(checkpoint: tuple[Path, Any], length: int, budget: int) -> None:
    directory, _ = checkpoint
    alone = []
    for seed in range(4):
        one = request("alone", sampled(seed), length)
        run(make_engine(directory), one)
        alone.append(one.output_token_ids)
    assert len({tuple(tokens) for tokens in alone}) == 4
    engine = make_engine(directory, budget=budget)
    leader = request("s0", sampled(0), length)
    leader.forks = forks = [request(f"s{seed}", sampled(seed), length) for seed in range(1, 4)]
    results = run(engine, leader)
    assert [leader.output_token_ids, *(fork.output_token_ids for fork in forks)] == alone
    assert engine.stats().num_prompt_tokens_computed == length
    first = {one.request_id: one.logprobs[0] for result in results for one in result.outputs if one.logprobs}
    assert len(first) == 4


def test_first_tokens_come_from_the_very_same_logits(checkpoint: tuple[Path, Any]) -> None:
    leader = request("s0", sampled(0, temperature=0))
    leader.forks = [request(f"s{i}", sampled(i, temperature=0)) for i in (1, 2)]
    results = run(make_engine(checkpoint[0]), leader)
    outputs = [one for result in results for one in result.outputs]
    first = {one.request_id: one for one in reversed(outputs)}.values()
    assert len({(one.token_ids, one.logprobs) for one in first}) == 1, "bit by bit"


def scores(engine: Engine, prompt: Sequence[int], num_best: int) -> list[PositionLogprobs]:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=num_best)
    results = run(engine, Request(request_id=RequestId("r"), prompt_token_ids=list(prompt), sampling=sampling))
    return [position for result in results for told in result.prompt_logprobs for position in told.positions]


def test_scores_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    """In one chunk, in many, and once more when the prompt is in the cache."""
    directory, reference = checkpoint
    expected = reference_logits(reference, PROMPT).double().log_softmax(-1)
    for budget in (64, 7, 1):
        engine = make_engine(directory, budget=budget)
        for _ in range(2):
            positions = scores(engine, PROMPT, 3)
            assert len(positions) == len(PROMPT) - 1
            for index, position in enumerate(positions):
                (own, logprob), *best = position.entries
                assert own == PROMPT[index + 1]
                assert logprob == pytest.approx(float(expected[index, own]), abs=1e-4)
                assert position.rank == 1 + int((expected[index] > expected[index, own]).sum())
                assert [token for token, _ in best] == expected[index].topk(3).indices.tolist()
                assert [value for _, value in best] == pytest.approx(expected[index].topk(3).values.tolist(), abs=1e-4)


def test_scores_of_many_rows_are_taken_a_few_at_a_time(checkpoint: tuple[Path, Any]) -> None:
    engine = make_engine(checkpoint[0])
    prompt = [(5 * i) % VOCAB for i in range(60)]
    whole = scores(engine, prompt, 1)
    seen: list[int] = []
    model = engine.model_runner._model  # type: ignore[attr-defined]
    head = model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return head(hidden)  # type: ignore[no-any-return]

    model.logits = watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvasir.engine.model_runner.ROWS_SCORED_AT_ONCE", 16)
        assert scores(engine, prompt, 1) == whole
    assert max(seen) == 16
    assert sum(seen) == 59 + 1


def test_logits_that_are_no_numbers_fail_the_scoring(checkpoint: tuple[Path, Any]) -> None:
    engine = make_engine(checkpoint[0], budget=8)
    engine.model_runner._model.logits = lambda hidden: torch.full((len(hidden), VOCAB), torch.nan)  # type: ignore[attr-defined]
    engine.submit(request("r", SamplingParams(max_tokens=1, prompt_logprobs=0)))
    result = engine.step()
    assert [failed.request_id for failed in result.failed] == ["r"]
    assert engine.stats().num_free_blocks == 64
