"""Outputs that keep to grammars, whatever else is asked for."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvasir.common.errors import InvalidRequest
from kvasir.engine.grammar import Compiled, GrammarMatcher, Grammars
from kvasir.engine.grammar_step import GrammarMasks
from kvasir.engine.request import FinishReason, Request
from kvasir.engine.sampler import sample
from kvasir.engine.step import Sampled
from tests.unit.engine.grammar_world import PERSON, Vocabulary, new_engine, regex, run


def one_step(request: Request, compiled: Compiled, *likes: int, size: int) -> Sampled:
    """The next token where the model likes these best, the first of them most."""
    logits = torch.zeros(1, size)
    for rank, token_id in enumerate(likes):
        logits[0, token_id] = 20.0 - rank
    request.matcher = request.matcher or compiled()
    masks = GrammarMasks().start([request]).result()
    (sampled,) = sample(logits, [request], masks)
    request.output_token_ids += sampled.token_ids
    return sampled


class TestOneToken:
    """Between the grammar and everything else that has a say in the choice."""

    @pytest.fixture(autouse=True)
    def _take(self, vocabulary: Vocabulary, grammars: Grammars) -> None:
        self.vocabulary, self.grammars = vocabulary, grammars
        self.a, self.b, self.c = (vocabulary.encode(char)[0] for char in "abc")
        self.eos = vocabulary.eos

    def step(self, request: Request, *likes: int) -> Sampled:
        assert request.sampling.grammar is not None
        compiled = self.grammars.compiled(request.sampling.grammar)
        return one_step(request, compiled, *likes, size=self.vocabulary.size)

    def request(self, pattern: str, **params: Any) -> Request:
        return self.vocabulary.request("r", regex(pattern), **{"temperature": 0.0, **params})

    def test_only_what_the_grammar_allows(self) -> None:
        request = self.request("[ab]c")
        assert self.step(request, self.c, self.b) == Sampled((self.b,))
        assert self.step(request, self.a) == Sampled((self.c,), completes_grammar=True)

    def test_the_end_is_allowed_where_the_grammar_is_satisfied(self) -> None:
        request = self.request("a+")
        assert self.step(request, self.eos, self.a).token_ids == (self.a,)
        assert self.step(request, self.eos, self.a).token_ids == (self.eos,)

    def test_min_tokens_hold_the_end_back_for_as_long_as_there_is_more_to_say(self) -> None:
        longer = self.request("a+", min_tokens=3)
        assert [self.step(longer, self.eos, self.a).token_ids[0] for _ in range(4)] == [self.a] * 3 + [self.eos]
        complete = self.request("a?", min_tokens=3)
        assert self.step(complete, self.eos) == Sampled((self.a,), completes_grammar=True)

    def test_ignore_eos_goes_on_until_the_grammar_ends(self) -> None:
        request = self.request("a{1,3}", stop_token_ids=frozenset())
        steps = [self.step(request, self.eos, self.a) for _ in range(3)]
        assert [one.token_ids[0] for one in steps] == [self.a] * 3
        assert [one.completes_grammar for one in steps] == [False, False, True]

    def test_a_stop_token_is_one_only_where_the_grammar_has_it(self) -> None:
        request = self.request("a[bc]", stop_token_ids=frozenset({self.b, self.eos}))
        assert self.step(request, self.b, self.a).token_ids == (self.a,)
        # It ends the request, so the grammar is asked no more.
        assert self.step(request, self.b) == Sampled((self.b,))

    def test_bias_and_penalties_choose_among_what_is_allowed(self) -> None:
        assert self.step(self.request("[ab]", logit_bias=((self.c, 100.0),)), self.b).token_ids == (self.b,)
        banned = self.request("[ab]", logit_bias=((self.a, -100.0), (self.b, -100.0)))
        assert self.step(banned, self.b).token_ids == (self.b,)
        penalised = self.request("[ab]+", frequency_penalty=2.0, repetition_penalty=50.0)
        assert [self.step(penalised, self.a, self.b).token_ids[0] for _ in range(2)] == [self.a, self.b]

    def test_allowed_ids_and_bad_words_give_way_where_the_grammar_wants_something_else(self) -> None:
        both = self.request("[ab]c", allowed_token_ids=(self.b,))
        assert [self.step(both, self.a).token_ids[0] for _ in range(2)] == [self.b, self.c]
        forced = self.request("[ab]c", bad_words=((self.a,), (self.c,)))
        assert [self.step(forced, self.a).token_ids[0] for _ in range(2)] == [self.b, self.c]

    def test_logprobs_are_of_the_raw_logits(self) -> None:
        sampled = self.step(self.request("b", logprobs=1), self.a, self.b)
        (position,) = sampled.logprobs
        assert position.rank == 2
        assert [token_id for token_id, _ in position.entries] == [self.b, self.a]

    @pytest.mark.parametrize("params", [{"top_k": 1}, {"top_k": 50, "top_p": 0.5}, {"min_p": 0.9}, {"top_p": 1e-6}])
    def test_what_is_cut_off_is_cut_off_from_what_is_allowed(self, params: dict[str, Any]) -> None:
        for seed in range(20):
            request = self.request("[ab]", temperature=1.0, seed=seed, **params)
            assert self.step(request, self.c, self.eos).token_ids[0] in (self.a, self.b)

    def test_a_request_that_was_moved_goes_on_where_it_was(self) -> None:
        request = self.vocabulary.request("r", regex("abc[ab]"), outputs=self.vocabulary.encode("abc"))
        assert self.step(request, self.c, self.b) == Sampled((self.b,), completes_grammar=True)

    def test_tokens_that_the_grammar_does_not_allow_are_an_error_of_this_request(self) -> None:
        request = self.vocabulary.request("r", regex("abc"), outputs=self.vocabulary.encode("ac"))
        sampled = self.step(request, self.c)
        assert isinstance(sampled.error, InvalidRequest)
        assert sampled.token_ids == ()

    def test_what_nobody_foresaw_is_an_error_of_this_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: GrammarMatcher, token_ids: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(GrammarMatcher, "follow", fail)
        assert isinstance(self.step(self.request("abc"), self.a).error, InvalidRequest)


def test_a_grammar_that_fails_takes_nobody_with_it(vocabulary: Vocabulary, grammars: Grammars) -> None:
    engine = new_engine(vocabulary)
    bad = vocabulary.request("bad", regex("abc"), outputs=vocabulary.encode("ac"))
    good = vocabulary.request("good", PERSON)
    ends = run(engine, grammars, bad, good)
    assert "grammar" in str(ends["bad"][1]) or "ac" in str(ends["bad"][1])
    assert ends["good"] == run(new_engine(vocabulary), grammars, vocabulary.request("good", PERSON))["good"]


def test_matches(vocabulary: Vocabulary, grammars: Grammars) -> None:
    patterns: Sequence[str] = ["[a-c]{3}", "(yes|no|w)", r"\d{4}-\d\d-\d\d", "日本(語|人)", r"(a|b)*c?", ""]
    requests = [vocabulary.request(f"r{i}", regex(pattern), max_tokens=80) for i, pattern in enumerate(patterns)]
    ends = run(new_engine(vocabulary), grammars, *requests)
    for pattern, request in zip(patterns, requests, strict=True):
        tokens, reason = ends[request.request_id]
        text = vocabulary.decode([token_id for token_id in tokens if token_id != vocabulary.eos])
        assert reason is FinishReason.STOP
        assert re.fullmatch(pattern, text), (pattern, text)
