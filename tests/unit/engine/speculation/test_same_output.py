"""With drafts, right ones and wrong ones, each request says what it says without, by every rule of sampling."""

from typing import Any

import pytest

from kvasir.common.grammar import Grammar
from kvasir.engine.engine import Engine
from kvasir.engine.grammar import Grammars
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.speculation.speculator import Speculator
from kvasir.engine.step import PositionLogprobs
from tests.unit.engine.drafting import Always, Oracle
from tests.unit.engine.grammar_world import Vocabulary, new_engine, note

Said = tuple[list[int], FinishReason | str, list[PositionLogprobs]]

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded": {"seed": 11, "logprobs": 0},
    "hot": {"seed": 12, "temperature": 2.5},
    "top k": {"seed": 13, "top_k": 5},
    "top p": {"seed": 14, "top_p": 0.6, "logprobs": 2},
    "min p": {"seed": 15, "min_p": 0.2},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "presence": {"seed": 16, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.9, "logprobs": 1},
    "bias": {"seed": 17, "logit_bias": ((40, 6.0), (41, -100.0))},
    "an end": {"seed": 24, "ends": True},
    "no end yet": {"temperature": 0.0, "min_tokens": 20, "ends": True},
    "allowed": {"seed": 18, "allowed_token_ids": tuple(range(30, 60))},
    "bad words": {"temperature": 0.0, "bad_words": ((70,), (71, 72))},
    "all of it": {
        "seed": 19, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "min_tokens": 9, "logit_bias": ((50, 3.0),), "logprobs": 2,
        "ends": True,
    },
    "one token": {"seed": 20, "max_tokens": 1},
    "two tokens": {"seed": 21, "max_tokens": 2},
    "grammar": {"seed": 22, "grammar": Grammar("regex", "([a-z]{2,5} )+[0-9]+")},
    "greedy grammar": {"temperature": 0.0, "logprobs": 1, "grammar": Grammar("regex", '\\{"a": "[^"]{1,12}"\\}')},
    "grammar and penalties": {
        "seed": 23, "frequency_penalty": 0.8, "bad_words": ((80,),),
        "grammar": Grammar("json_schema", '{"type": "array", "maxItems": 4}'),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(vocabulary: Vocabulary, grammars: Grammars) -> dict[str, Said]:
    """What each says without drafts."""
    return say(new_engine(vocabulary), grammars, requests_of(vocabulary))


def requests_of(vocabulary: Vocabulary) -> list[Request]:
    requests = []
    for name, options in OPTIONS.items():
        params = {"max_tokens": 40, **options}
        if not params.pop("ends", "grammar" in params):
            params["stop_token_ids"] = frozenset()
        requests.append(vocabulary.request(name, params.pop("grammar", None), **params))
    return requests


def say(engine: Engine, grammars: Grammars, requests: list[Request]) -> dict[str, Said]:
    ends: dict[str, FinishReason | str] = {}
    logprobs: dict[str, list[PositionLogprobs]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
        if request.sampling.grammar is not None:
            engine.grammar_ready(request.request_id, grammars.compiled(request.sampling.grammar))
    while engine.has_work:
        result = engine.step()
        engine.check_invariants()
        note(result, ends)
        for output in result.outputs:
            logprobs[output.request_id] += output.logprobs
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return {one.request_id: (one.output_token_ids, ends[one.request_id], logprobs[one.request_id]) for one in requests}


def speculate(engine: Engine, expected: dict[str, Said], num_drafts: int) -> Engine:
    def future(request: Request, most: int) -> list[int]:
        start = len(request.output_token_ids)
        said = expected[request.request_id][0][start : start + most]
        return said + [5] * (most - len(said))

    engine.speculator = Speculator(Oracle(future), engine.scheduler, num_drafts, Always())
    return engine


@pytest.mark.parametrize("num_drafts", [1, 4, 12])
def test_every_rule_of_sampling(
    vocabulary: Vocabulary, grammars: Grammars, alone: dict[str, Said], num_drafts: int
) -> None:
    engine = speculate(new_engine(vocabulary, max_num_batched_tokens=200), alone, num_drafts)
    said = say(engine, grammars, requests_of(vocabulary))
    for name in OPTIONS:
        assert said[name] == alone[name], name
    stats = engine.stats()
    assert stats.num_accepted_tokens > 0.15 * stats.num_generation_tokens
    assert stats.num_accepted_tokens < stats.num_draft_tokens


def test_one_after_the_other_and_in_little_room(
    vocabulary: Vocabulary, grammars: Grammars, alone: dict[str, Said]
) -> None:
    engine = speculate(new_engine(vocabulary, max_num_seqs=1), alone, 5)
    assert say(engine, grammars, requests_of(vocabulary)) == alone
    small = speculate(new_engine(vocabulary, num_blocks=60, watermark=0.0), alone, 5)
    assert say(small, grammars, requests_of(vocabulary)) == alone
    assert small.stats().num_preemptions > 0
    assert small.stats().num_accepted_tokens > 0


def test_a_request_that_moves_goes_on_with_the_same_tokens(
    vocabulary: Vocabulary, grammars: Grammars, alone: dict[str, Said]
) -> None:
    """It comes with some of its output, and a fresh matcher."""
    moved = []
    for request in requests_of(vocabulary):
        tokens = alone[request.request_id][0]
        if len(tokens) > 8:
            request.output_token_ids = tokens[:7]
            moved.append(request)
    engine = speculate(new_engine(vocabulary, max_num_batched_tokens=200), alone, 4)
    said = say(engine, grammars, moved)
    assert len(said) > 12
    for request in moved:
        assert said[request.request_id][:2] == alone[request.request_id][:2], request.request_id


def test_cancelled_in_between(vocabulary: Vocabulary, grammars: Grammars, alone: dict[str, Said]) -> None:
    """Half of them, in a step in which all had drafts; nobody else notices."""
    engine = speculate(new_engine(vocabulary, max_num_batched_tokens=200), alone, 4)
    requests = requests_of(vocabulary)
    leaving = requests[::2]
    staying = [request for request in requests if request not in leaving]
    for request in leaving:
        engine.submit(request)
        if request.sampling.grammar is not None:
            engine.grammar_ready(request.request_id, grammars.compiled(request.sampling.grammar))
    for _ in range(4):
        engine.step()
    for request in leaving:
        engine.cancel(request.request_id)
        engine.check_invariants()
    said = say(engine, grammars, staying)
    assert said == {name: alone[name] for name in said}


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_numbers_that_are_none_behind_a_draft_fail_the_request_when_they_come_first(
    vocabulary: Vocabulary, alone: dict[str, Said], num_drafts: int
) -> None:
    """What was said before them has been said, as without drafts."""
    engine = new_engine(vocabulary)
    runner: Any = engine.model_runner
    compute = runner.logits
    runner.logits = lambda digest, request, i: (
        compute(digest, request, i) * (float("nan") if len(request.output_token_ids) + i == 4 else 1)
    )
    if num_drafts:
        speculate(engine, alone, num_drafts)
    engine.submit(next(one for one in requests_of(vocabulary) if one.request_id == "greedy"))
    said: list[int] = []
    failed: list[RequestId] = []
    while engine.has_work:
        result = engine.step()
        said += [token for output in result.outputs for token in output.token_ids]
        failed += [one.request_id for one in result.failed]
    assert failed == ["greedy"]
    assert said == alone["greedy"][0][:4]
