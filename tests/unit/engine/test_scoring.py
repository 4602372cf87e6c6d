"""Logprobs of a prompt's own tokens: each once, whatever the cache holds and however the prompt is cut."""

import pytest

from kvasir.engine.engine import Engine
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.step import PositionLogprobs, StepResult
from tests.fakes import fake_score, fake_tokens
from tests.unit.engine.test_engine import make_engine, make_request, outputs_of, run


def scoring(prompt: list[int], max_tokens: int = 4, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2)
    return Request(request_id=RequestId("r"), prompt_token_ids=list(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


def scores_of(results: list[StepResult]) -> list[PositionLogprobs]:
    scores: list[PositionLogprobs] = []
    for told in (told for result in results for told in result.prompt_logprobs):
        assert told.first_position == 1 + len(scores)
        scores += told.positions
    return scores


def expected(prompt: list[int]) -> list[PositionLogprobs]:
    return [fake_score(prompt, position) for position in range(1, len(prompt))]


@pytest.mark.parametrize("length", [1, 2, 4, 11])
@pytest.mark.parametrize("budget", [64, 3, 1])
def test_every_token_but_the_first_has_its_score(length: int, budget: int) -> None:
    prompt = list(range(50, 50 + length))
    results = run(make_engine(budget=budget), scoring(prompt))
    assert scores_of(results) == expected(prompt)
    assert outputs_of(results, "r")[0] == fake_tokens(prompt, 4)


def test_what_is_cached_is_computed_again() -> None:
    prompt = list(range(11))
    engine = make_engine()
    run(engine, make_request("warm", prompt))
    results = run(engine, scoring(prompt))
    assert scores_of(results) == expected(prompt)
    assert [one.num_cached_tokens for result in results for one in result.admitted] == [0]
    assert engine.stats().num_prompt_tokens_computed == 22


def test_nothing_is_told_twice_after_a_preemption() -> None:
    """Taken away in the middle of its prompt, and again while it generates."""
    for num_blocks, budget in ((6, 2), (7, 64)):
        engine = make_engine(num_blocks=num_blocks, budget=budget, policy="priority", watermark=0.0)
        prompt = list(range(13))
        engine.submit(make_request("first", [1, 2, 3], 14))
        request = scoring(prompt, 9, priority=1)
        results = run(engine, request)
        assert request.num_preemptions > 0
        assert scores_of(results) == expected(prompt)
        assert outputs_of(results, "r")[0] == fake_tokens(prompt, 9)


@pytest.mark.parametrize("hand_off", [False, True])
def test_without_tokens_to_generate_a_prompt_is_scored_and_that_is_all(hand_off: bool) -> None:
    prompt = list(range(9))
    engine = make_engine(budget=4)
    results = run(engine, scoring(prompt, 0, hand_off=hand_off))
    assert scores_of(results) == expected(prompt)
    assert outputs_of(results, "r") == ([], [FinishReason.LENGTH])
    assert engine.stats().num_generation_tokens == 0
    give_back(engine, results)
    assert engine.stats().num_free_blocks == 64


def give_back(engine: Engine, results: list[StepResult]) -> None:
    for report in (report for result in results for report in result.computed):
        engine.release_blocks(report.block_ids)
