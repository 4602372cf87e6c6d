"""Outputs of a grammar do not depend on how the work is cut: over steps, nodes and sequences."""

import json
from typing import Any

import pytest

from kvasir.engine.grammar import Grammars
from kvasir.engine.request import FinishReason, RequestId
from tests.unit.engine.grammar_world import PERSON, Vocabulary, new_engine, note, regex, run


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
