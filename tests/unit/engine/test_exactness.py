"""Blocks that went through a lossy codec, or were computed in another dtype, serve their own request alone.

The fake model's KV depends on all KV before it, so what is computed on top of a changed block is changed too.
"""

import pytest

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.engine import Engine
from kvasir.engine.request import Phase, Request, RequestId
from kvasir.engine.step import ComputedBlocks
from tests.fakes import fake_kv, fake_tokens
from tests.unit.engine.test_engine import hash_of, make_engine, make_request, outputs_of, run, runner_of

ID = RequestId("r")
PROMPT = list(range(22))  # blocks of 4: five full ones, and a partial one
HASHES = block_hashes(root_hash(b"fake-model"), PROMPT, 4)


def load(engine: Engine, request: Request, inexact: set[int], lost: frozenset[int] = frozenset()) -> None:
    """All blocks land, last one first, but for the lost ones; the inexact ones are a little off."""
    engine.submit(request)
    engine.step()
    for index in reversed(range(6)):
        if index not in lost:
            values = [value + (index in inexact) for value in fake_kv(PROMPT)[4 * index : 4 * index + 4]]
            runner_of(engine).kv[request.block_table[index], : len(values)] = values
            engine.block_loaded(ID, index, index not in inexact)
    engine.loading_done(ID)


def awaiting(**fields: object) -> Request:
    return make_request("r", list(PROMPT), **{"awaits": {"blocks"}, **fields})


def num_found(engine: Engine) -> int:
    """How many leading blocks of the prompt another request would find."""
    return len(engine.scheduler.tables.cache.match(HASHES))


@pytest.mark.parametrize(
    ("inexact", "lost", "num_cached"),
    [
        ({0}, frozenset(), 0),
        ({3}, frozenset(), 3),
        ({4, 2}, frozenset(), 2),
        ({5}, frozenset(), 5),
        ({2}, frozenset({1}), 2),
        ({2}, frozenset({3}), 2),
        (set(), frozenset({0, 3}), 5),
    ],
)
def test_only_what_comes_before_the_first_inexact_block_is_found_by_others(
    inexact: set[int], lost: frozenset[int], num_cached: int
) -> None:
    """Holes before it are computed here, exactly; what is computed on top of it is not exact, landed or not."""
    engine = make_engine()
    load(engine, awaiting(), inexact, lost)
    run(engine)
    assert num_found(engine) == num_cached
    again = make_request("s", list(PROMPT))
    tokens, _ = outputs_of(run(engine, again), "s")
    assert tokens == fake_tokens(PROMPT, 8, hash_of("s"))
    assert again.num_cached_tokens == 4 * num_cached


def test_generated_tokens_behind_an_inexact_block_are_not_found_either() -> None:
    engine = make_engine()
    request = awaiting()
    load(engine, request, {5})
    run(engine)
    whole = request.prompt_token_ids + request.output_token_ids
    hashes = block_hashes(root_hash(b"fake-model"), whole, 4)
    assert len(hashes) == 7
    assert len(engine.scheduler.tables.cache.match(hashes)) == 5


def test_a_mark_for_a_block_that_was_not_awaited_changes_nothing() -> None:
    engine = make_engine()
    run(engine, make_request("warm", list(PROMPT)))
    request = awaiting()
    engine.submit(request)
    engine.step()
    for index in (0, 4, 17, -1):  # in the prefix cache already, or past the prompt
        engine.block_loaded(ID, index, is_exact=False)
    engine.loading_done(ID)
    assert request.inexact_from is None
    assert outputs_of(run(engine), "r")[0] == fake_tokens(PROMPT, 8, hash_of("r"))


def test_computed_again_after_a_preemption_it_is_exact() -> None:
    """Its blocks are taken away; from then on all that it holds was computed here, or found under an exact hash."""
    engine = make_engine(num_blocks=10, policy="priority")
    request = awaiting(priority=1)
    engine.submit(make_request("first", [1, 2, 3], 16))
    load(engine, request, {0})
    before: list[int] = []
    while request.num_preemptions == 0:
        before = list(request.output_token_ids)
        engine.step()
    assert num_found(engine) == 0
    assert request.inexact_from is None
    assert before, "it has generated on top of what was inexact"
    while request.phase is not Phase.FINISHED:
        engine.step()
        engine.check_invariants()
    assert num_found(engine) == 5
    whole = PROMPT + request.output_token_ids
    known = PROMPT + before
    assert whole[len(known) :] == fake_tokens(known, len(whole) - len(known), hash_of("r"))


def reports_of(inexact: set[int]) -> list[ComputedBlocks]:
    """Of a prefill node that takes a prompt from a store, and hands it off."""
    engine = make_engine(budget=8)
    engine.submit(request := awaiting(hand_off=True))
    engine.step()
    for index in range(4):
        runner_of(engine).kv[request.block_table[index]] = fake_kv(PROMPT)[4 * index : 4 * index + 4]
        engine.block_loaded(ID, index, index not in inexact)
    engine.loading_done(ID)
    return [report for result in run(engine) for report in result.computed]


@pytest.mark.parametrize("first_inexact", [0, 2, 3, None])
def test_nothing_inexact_is_handed_off_under_its_hash(first_inexact: int | None) -> None:
    reports = reports_of(set() if first_inexact is None else {first_inexact})
    hashes = [block_hash for report in reports for block_hash in report.hashes]
    num_exact = 5 if first_inexact is None else first_inexact
    assert hashes == [*HASHES[:num_exact], *[None] * (6 - num_exact)]
    assert [report.num_tokens for report in reports][-1][-1] == 2
    assert reports[-1].is_last
