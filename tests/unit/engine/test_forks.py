"""Several sequences of one prompt: computed once, its blocks shared, each sequence as if it were alone."""

import pytest

from kvasir.common.errors import NumericalError
from kvasir.engine.engine import Engine
from kvasir.engine.request import FinishReason, Phase, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from tests.fakes import fake_kv, fake_tokens
from tests.unit.engine.test_engine import make_engine, outputs_of, run, runner_of


def group(prompt: list[int], num: int = 3, max_tokens: int = 8, **fields: object) -> list[Request]:
    """The leader first; sequence i has seed i."""
    awaits = fields.pop("awaits", set())
    requests = [
        Request(
            request_id=RequestId(f"s{i}"),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=i),
            awaits=set(awaits) - ({"blocks"} if i else set()),  # type: ignore[call-overload]
            **fields,  # type: ignore[arg-type]
        )
        for i in range(num)
    ]
    requests[0].forks = requests[1:]
    return requests


def alone(prompt: list[int], seed: int, num_tokens: int = 8) -> list[int]:
    return fake_tokens(prompt, num_tokens, seed)


def used(engine: Engine) -> int:
    return engine.stats().num_total_blocks - engine.stats().num_free_blocks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once_and_shared(length: int, caching: bool) -> None:
    prompt = list(range(length))
    engine = make_engine(caching=caching)
    results = run(engine, group(prompt)[0])
    for seed in range(3):
        assert outputs_of(results, f"s{seed}") == (alone(prompt, seed), [FinishReason.LENGTH])
    assert engine.stats().num_prompt_tokens_computed == length
    assert len(results[0].outputs) == 3, "all first tokens come from one step"
    assert [len(result.admitted) for result in results] == [1] + [0] * 7
    assert used(engine) == 0


def test_full_blocks_are_held_in_common() -> None:
    """11 tokens: two full blocks once, and the third, partial one for each of three."""
    engine = make_engine()
    engine.submit(group(list(range(11)))[0])
    engine.step()
    assert used(engine) == 2 + 3


def test_greedy_sequences_are_equal() -> None:
    requests = group([1, 2, 3, 4, 5])
    for request in requests:
        request.sampling = SamplingParams(max_tokens=8)
    results = run(make_engine(), requests[0])
    texts = [outputs_of(results, request.request_id)[0] for request in requests]
    assert texts == [alone([1, 2, 3, 4, 5], 0)] * 3


def test_a_prefill_node_samples_all_first_tokens_and_hands_off_once() -> None:
    prompt = list(range(10))
    engine = make_engine(budget=4)
    results = run(engine, group(prompt, hand_off=True)[0])
    for seed in range(3):
        assert outputs_of(results, f"s{seed}") == (alone(prompt, seed, 1), [FinishReason.HANDED_OFF])
    reports = [report for result in results for report in result.computed]
    assert [(report.request_id, report.first_index) for report in reports] == [("s0", 0), ("s0", 1), ("s0", 2)]
    for report in reports:
        engine.release_blocks(report.block_ids)
    assert used(engine) == 0


def load(engine: Engine, requests: list[Request], lost: tuple[int, ...] = ()) -> None:
    """What a transfer does, but for the blocks that it loses."""
    leader = requests[0]
    engine.submit(leader)
    (admitted,) = engine.step().admitted
    for index in admitted.missing:
        if index not in lost:
            values = fake_kv(leader.prompt_token_ids)[index * 4 : index * 4 + 4]
            runner_of(engine).kv[leader.block_table[index], : len(values)] = values
            engine.block_loaded(leader.request_id, index)


def continue_all(engine: Engine, requests: list[Request]) -> None:
    for request in reversed(requests):
        engine.continue_with(request.request_id, alone(request.prompt_token_ids, request.sampling.seed, 1))


@pytest.mark.parametrize("length", [4, 11])
@pytest.mark.parametrize("lost", [(), (0,), (1, 2)])
def test_a_loaded_prompt_is_shared_too(length: int, lost: tuple[int, ...]) -> None:
    prompt = list(range(length))
    engine, requests = make_engine(caching=False), group(prompt, awaits={"blocks", "continue"})
    load(engine, requests, lost)
    continue_all(engine, requests)
    engine.loading_done(requests[0].request_id)
    results = run(engine)
    for seed in range(3):
        assert outputs_of(results, f"s{seed}")[0] == alone(prompt, seed)[1:]
    num_lost = sum(min(4, length - index * 4) for index in lost if index * 4 < length)
    stats = engine.stats()
    assert (stats.num_prompt_tokens_computed, stats.num_recomputed_tokens) == (num_lost, num_lost)
    assert used(engine) == 0


@pytest.mark.parametrize("when", ["loading", "computing"])
def test_a_leader_that_ends_early_still_brings_the_prompt(when: str) -> None:
    prompt = list(range(11))
    engine, requests = make_engine(budget=2, caching=False), group(prompt, awaits={"blocks", "continue"})
    load(engine, requests, lost=(1, 2))
    continue_all(engine, requests)
    if when == "loading":
        engine.cancel(RequestId("s0"))
    engine.loading_done(RequestId("s0"))
    if when == "computing":
        engine.step()
        engine.cancel(RequestId("s0"))
    engine.check_invariants()
    results = run(engine)
    assert outputs_of(results, "s0") == ([], [])
    assert outputs_of(results, "s1")[0] == alone(prompt, 1)[1:]
    assert outputs_of(results, "s2")[0] == alone(prompt, 2)[1:]
    assert used(engine) == 0


def test_when_the_last_fork_has_gone_its_leader_goes() -> None:
    engine, requests = make_engine(), group(list(range(11)), awaits={"blocks", "continue"})
    load(engine, requests)
    for request in requests:
        engine.cancel(request.request_id)
    engine.check_invariants()
    assert used(engine) == 3, "the transfer still writes"
    engine.loading_done(RequestId("s0"))
    assert (used(engine), engine.scheduler.requests) == (0, {})


def test_a_fork_may_end_with_its_first_token() -> None:
    prompt = list(range(6))
    engine, requests = make_engine(), group(prompt)
    requests[1].sampling = SamplingParams(max_tokens=8, seed=1, stop_token_ids=frozenset(alone(prompt, 1, 1)))
    results = run(engine, requests[0])
    assert outputs_of(results, "s1") == (alone(prompt, 1, 1), [FinishReason.STOP])
    assert outputs_of(results, "s2")[0] == alone(prompt, 2)
    assert used(engine) == 0


def test_forks_without_a_seat_or_a_block_wait_and_lose_nothing() -> None:
    prompt = list(range(7))
    for options in ({"num_seqs": 2}, {"num_blocks": 5}, {"num_seqs": 1, "caching": False}):
        engine = make_engine(watermark=0.0, **options)  # type: ignore[arg-type]
        results = run(engine, group(prompt, num=5)[0])
        for seed in range(5):
            assert outputs_of(results, f"s{seed}")[0] == alone(prompt, seed)
        assert used(engine) == 0


def test_a_preempted_fork_goes_on_with_the_same_tokens() -> None:
    prompt = list(range(9))
    engine = make_engine(num_blocks=10, watermark=0.0)
    results = run(engine, group(prompt, num=4, max_tokens=20)[0])
    assert engine.stats().num_preemptions > 0
    for seed in range(4):
        assert outputs_of(results, f"s{seed}")[0] == alone(prompt, seed, 20)


def test_forks_that_were_not_continued_say_nothing() -> None:
    prompt = list(range(6))
    engine, requests = make_engine(), group(prompt, num=2, awaits={"continue"})
    engine.submit(requests[0])
    engine.step()
    engine.continue_with(RequestId("s0"), [])
    results = run(engine)
    assert outputs_of(results, "s0")[0] == alone(prompt, 0)
    assert outputs_of(results, "s1")[0] == []
    assert requests[1].phase is Phase.LOADING
    engine.continue_with(RequestId("s1"), alone(prompt, 1, 1))
    assert outputs_of(run(engine), "s1")[0] == alone(prompt, 1)[1:]


def test_what_is_wrong_with_the_prompt_is_wrong_with_all() -> None:
    engine, requests = make_engine(), group([1, 2])
    runner_of(engine).non_finite.add(RequestId("s0"))
    failed = [failed for result in run(engine, requests[0]) for failed in result.failed]
    assert {one.request_id for one in failed} == {"s0", "s1", "s2"}
    assert all(isinstance(one.error, NumericalError) for one in failed)
    assert used(engine) == 0


def test_blocks_that_are_not_exact_stay_so_in_the_forks() -> None:
    engine, requests = make_engine(), group(list(range(9)), num=2, awaits={"blocks", "continue"})
    load(engine, requests)
    engine.block_loaded(RequestId("s0"), 1, is_exact=False)
    continue_all(engine, requests)
    engine.loading_done(RequestId("s0"))
    run(engine)
    assert len(engine.scheduler.tables.cache.snapshot()) == 1, "only the block before it can be found"
