"""Outputs that keep to grammars, whatever else is asked for and however the work is cut."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.common import grammar_compiler
from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.engine import grammar as grammar_module
from kvasir.engine.async_engine import AsyncEngine
from kvasir.engine.engine import Engine
from kvasir.engine.grammar import Compiled, GrammarMatcher, Grammars
from kvasir.engine.grammar_step import GrammarMasks
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.sampler import sample
from kvasir.engine.step import Sampled, StepResult
from tests.tokenizers import save_byte_level
from tests.unit.engine.grammar_world import Vocabulary, new_engine, note, run

DEADLINE_S = 30
PERSON = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 3},
                "kind": {"enum": ["cat", "dog", "日本"]},
            },
            "required": ["name", "ages", "kind"],
            "additionalProperties": False,
        }
    ),
)


def regex(pattern: str) -> Grammar:
    return Grammar("regex", pattern)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(save_byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return vocabulary.grammars()


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


# --- however the work is cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"seed": 7}, {"seed": 8, "top_k": 30}, {"temperature": 0.0}])
def test_output_does_not_depend_on_how_the_work_is_cut(
    vocabulary: Vocabulary, grammars: Grammars, params: dict[str, Any]
) -> None:
    expected, reason = run(new_engine(vocabulary), grammars, vocabulary.request("r", PERSON, **params))["r"]
    assert reason is FinishReason.STOP
    json.loads(vocabulary.decode(expected))

    # The first token on one node, the others on another.
    first = vocabulary.request("r", PERSON, **params)
    first.hand_off = True
    tokens, reason = run(new_engine(vocabulary), vocabulary.grammars(), first)["r"]
    assert (tokens, reason) == (expected[:1], FinishReason.HANDED_OFF)

    # Continued elsewhere, after any number of tokens.
    for num_tokens in (1, 2, len(expected) // 2, len(expected) - 1):
        moved = vocabulary.request("r", PERSON, expected[:num_tokens], **params)
        tokens, reason = run(new_engine(vocabulary), vocabulary.grammars(), moved)["r"]
        assert (tokens, reason) == (expected, FinishReason.STOP)

    # In chunks, beside others, and preempted again and again.
    engine = new_engine(vocabulary, num_blocks=44, max_num_batched_tokens=9, max_num_seqs=6)
    others = [vocabulary.request(f"other-{index}", PERSON, seed=index, max_tokens=60) for index in range(5)]
    tokens, reason = run(engine, grammars, *others, vocabulary.request("r", PERSON, **params))["r"]
    assert engine.stats().num_preemptions > 0
    assert (tokens, reason) == (expected, FinishReason.STOP)


def test_several_sequences_of_one_prompt_each_follow_the_grammar(vocabulary: Vocabulary, grammars: Grammars) -> None:
    alone = [
        run(new_engine(vocabulary), grammars, vocabulary.request("leader", PERSON, seed=seed))["leader"]
        for seed in range(4)
    ]
    leader = vocabulary.request("leader", PERSON, seed=0)
    for seed in (1, 2, 3):
        fork = vocabulary.request("leader", PERSON, seed=seed)
        fork.request_id = RequestId(f"fork-{seed}")
        leader.forks.append(fork)
    everyone = [leader, *leader.forks]
    engine = new_engine(vocabulary)
    ends: dict[str, FinishReason | str] = {}
    engine.submit(leader)
    assert engine.step().admitted
    assert not engine.has_work, "nothing is computed while the grammar is being compiled"
    engine.grammar_ready(leader.request_id, grammars.compiled(PERSON))
    while engine.has_work:
        note(engine.step(), ends)
    assert [(one.output_token_ids, ends[one.request_id]) for one in everyone] == alone


def test_cut_short_is_said(vocabulary: Vocabulary, grammars: Grammars) -> None:
    whole, _ = run(new_engine(vocabulary), grammars, vocabulary.request("r", PERSON))["r"]
    for max_tokens in (1, 5, len(whole) - 1):
        cut, reason = run(new_engine(vocabulary), grammars, vocabulary.request("r", PERSON, max_tokens=max_tokens))["r"]
        assert (cut, reason) == (whole[:max_tokens], FinishReason.LENGTH)
    exact, reason = run(new_engine(vocabulary), grammars, vocabulary.request("r", PERSON, max_tokens=len(whole)))["r"]
    assert (exact, reason) == (whole, FinishReason.STOP)


def test_an_answer_of_one_token_ends_on_the_node_of_the_first_token(vocabulary: Vocabulary, grammars: Grammars) -> None:
    request = vocabulary.request("r", regex("he|w"))
    request.hand_off = True
    tokens, reason = run(new_engine(vocabulary), grammars, request)["r"]
    assert vocabulary.decode(tokens) in ("he", "w") or tokens == vocabulary.encode("h")
    assert reason is (FinishReason.HANDED_OFF if vocabulary.decode(tokens) == "h" else FinishReason.STOP)


def test_a_grammar_that_fails_takes_nobody_with_it(vocabulary: Vocabulary, grammars: Grammars) -> None:
    engine = new_engine(vocabulary)
    bad = vocabulary.request("bad", regex("abc"), outputs=vocabulary.encode("ac"))
    good = vocabulary.request("good", PERSON)
    ends = run(engine, grammars, bad, good)
    assert "grammar" in str(ends["bad"][1]) or "ac" in str(ends["bad"][1])
    assert ends["good"] == run(new_engine(vocabulary), grammars, vocabulary.request("good", PERSON))["good"]


# --- the lexer and the cache ------------------------------------------------------------------------------------


def text_of_random_tokens(matcher: GrammarMatcher, rng: random.Random, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(rng.choice(matcher.allowed(()).nonzero()[0].tolist()))
        matcher.take(tokens[-1])
    return tokens


def test_a_full_lexer_is_nobody_elses_trouble(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others generated by the same grammar has filled the shared lexer; the next one does not notice."""
    limits = grammar_compiler.LLParserLimits(max_lexer_states=2_000, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    greedy = regex("(.*[a-zA-Z].{15}[0-9])*")
    grammars = vocabulary.grammars()
    compiled = grammars.compiled(greedy)
    alone = text_of_random_tokens(vocabulary.grammars().compiled(greedy)(), random.Random(1), 20)
    for seed in range(2, 200):
        text_of_random_tokens(compiled(), random.Random(seed), 100)
        if grammars.cached(greedy) is None:
            break
    else:
        pytest.fail("the shared lexer was never full")
    assert grammars.compiled(greedy) is not compiled, "it is compiled afresh for those who come"
    assert text_of_random_tokens(compiled(), random.Random(1), 20) == alone


def test_compiled_grammars_are_remembered_within_bounds(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_NUM_CACHED", 3)
    monkeypatch.setattr(grammar_module, "_MAX_CACHED_CHARS", 100)
    grammars = vocabulary.grammars()
    sources = [regex(f"a{{{index}}}") for index in range(5)]
    for one in sources:
        assert grammars.compiled(one) is grammars.compiled(one)
    assert [grammars.cached(one) is not None for one in sources] == [False, False, True, True, True]
    grammars.compiled(regex("b" * 94))
    assert [grammars.cached(one) is not None for one in sources] == [False] * 4 + [True]
    grammars.compiled(regex("c" * 101))
    assert grammars.cached(regex("c" * 101)) is None


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        Grammars(tmp_path / "tokenizer.json", 100, {1}).compiled(PERSON)


# --- compiled beside the engine ---------------------------------------------------------------------------------


class SlowGrammars(Grammars):
    """Compiles when it is told to."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.path, vocabulary.size, {vocabulary.eos})
        self.gate = threading.Event()
        self.entered = threading.Event()

    def compiled(self, grammar: Grammar) -> Compiled:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        return super().compiled(grammar)


class Bench:
    """A started engine."""

    def __init__(self, vocabulary: Vocabulary, grammars: Grammars | None) -> None:
        inner = new_engine(vocabulary)
        inner.grammars = grammars
        self.engine = AsyncEngine(inner, on_result=self._on_result, on_crash=self._on_crash)
        self.ends: dict[str, FinishReason | str] = {}
        self.num_outputs = 0
        self._news = asyncio.Event()

    def _on_result(self, result: StepResult) -> None:
        note(result, self.ends)
        self.num_outputs += len(result.outputs)
        self._news.set()

    def _on_crash(self, error: Exception) -> None:
        self.ends["crash"] = repr(error)
        self._news.set()

    async def ended(self, *names: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not set(names) <= self.ends.keys():
                assert "crash" not in self.ends, self.ends
                self._news.clear()
                await self._news.wait()


async def test_the_batch_runs_on_while_a_grammar_compiles(vocabulary: Vocabulary) -> None:
    grammars = SlowGrammars(vocabulary)
    bench = Bench(vocabulary, grammars)
    await bench.engine.start()
    constrained, free = vocabulary.request("constrained", PERSON), vocabulary.request("free", None, max_tokens=50)
    bench.engine.submit(constrained)
    await asyncio.to_thread(grammars.entered.wait, DEADLINE_S)
    bench.engine.submit(free)
    await bench.ended("free")
    assert constrained.output_token_ids == []
    async with asyncio.timeout(DEADLINE_S):
        while bench.engine.age_s > 0:  # an engine that waits for a compiler alone is idle, not stuck
            await asyncio.sleep(0.001)
    grammars.gate.set()
    await bench.ended("constrained")
    assert bench.ends["constrained"] is FinishReason.STOP
    await bench.engine.close()


@pytest.mark.parametrize("num_forks", [0, 2])
async def test_a_grammar_that_does_not_compile_fails_its_request_alone(vocabulary: Vocabulary, num_forks: int) -> None:
    grammars = SlowGrammars(vocabulary)
    bench = Bench(vocabulary, grammars)
    await bench.engine.start()
    request = vocabulary.request("bad", regex("(["))
    request.awaits.add("blocks")  # a transfer may be writing into its blocks: they stay until it has ended
    for index in range(num_forks):
        request.forks.append(vocabulary.request(f"bad-{index}", regex("([")))
    bench.engine.submit(request)
    async with asyncio.timeout(DEADLINE_S):
        while not await bench.engine.call(lambda engine: len(engine.scheduler.loading)):
            await asyncio.sleep(0.001)
    grammars.gate.set()
    bench.engine.submit(vocabulary.request("good", PERSON))
    names = ["bad", *(f"bad-{index}" for index in range(num_forks))]
    await bench.ended("good", *names)
    assert all("unclosed" in str(bench.ends[name]) for name in names)
    assert await bench.engine.call(lambda engine: len(engine.scheduler.requests)) == 1
    bench.engine.loading_done(request.request_id)
    assert await bench.engine.call(lambda engine: len(engine.scheduler.requests)) == 0
    assert await bench.engine.call(Engine.check_invariants) is None
    await bench.engine.close()


async def test_a_request_that_is_cancelled_while_its_grammar_compiles(vocabulary: Vocabulary) -> None:
    grammars = SlowGrammars(vocabulary)
    bench = Bench(vocabulary, grammars)
    await bench.engine.start()
    bench.engine.submit(vocabulary.request("r", PERSON))
    await asyncio.to_thread(grammars.entered.wait, DEADLINE_S)
    bench.engine.cancel(RequestId("r"))
    assert await bench.engine.call(lambda engine: len(engine.scheduler.requests)) == 0
    grammars.gate.set()
    bench.engine.submit(vocabulary.request("next", PERSON))
    await bench.ended("next")
    assert list(bench.ends) == ["next"]
    await bench.engine.close()


async def test_a_node_without_grammars_refuses_at_once(vocabulary: Vocabulary) -> None:
    bench = Bench(vocabulary, None)
    await bench.engine.start()
    with pytest.raises(InvalidRequest, match="grammar"):
        bench.engine.submit(vocabulary.request("r", PERSON))
    await bench.engine.close()


def test_tokens_to_be_computed_are_queued_while_the_grammar_compiles(vocabulary: Vocabulary) -> None:
    engine = new_engine(vocabulary)
    request = vocabulary.request("r", PERSON)
    engine.submit(request)
    engine.step()
    assert engine.stats().num_queued_tokens == request.num_tokens


def test_matches(vocabulary: Vocabulary, grammars: Grammars) -> None:
    patterns: Sequence[str] = ["[a-c]{3}", "(yes|no|w)", r"\d{4}-\d\d-\d\d", "日本(語|人)", r"(a|b)*c?", ""]
    requests = [vocabulary.request(f"r{i}", regex(pattern), max_tokens=80) for i, pattern in enumerate(patterns)]
    ends = run(new_engine(vocabulary), grammars, *requests)
    for pattern, request in zip(patterns, requests, strict=True):
        tokens, reason = ends[request.request_id]
        text = vocabulary.decode([token_id for token_id in tokens if token_id != vocabulary.eos])
        assert reason is FinishReason.STOP
        assert re.fullmatch(pattern, text), (pattern, text)


def test_a_lexer_that_is_full_in_mid_step_is_not_replaced_at_the_cost_of_all(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = grammar_compiler.LLParserLimits(max_lexer_states=500, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "_LIMITS", limits)
    monkeypatch.setattr(grammar_module, "_MAX_RECOMPILE_S", 0.0)
    compiled = vocabulary.grammars().compiled(regex("(.*[a-zA-Z].{15}[0-9])*"))
    with pytest.raises(InvalidRequest, match="too complex"):
        for seed in range(200):
            text_of_random_tokens(compiled(), random.Random(seed), 100)
