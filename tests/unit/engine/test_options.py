"""What can be told to a scheduler by vLLM's names does what it says."""

import pytest

from kvasir.engine.engine import Engine
from tests.unit.engine.test_engine import make_engine, make_request, run, runner_of


def sizes_of(engine: Engine) -> list[int]:
    return [plan.num_tokens for plan in runner_of(engine).plans]


def test_max_num_batched_tokens_is_the_most_of_a_step_and_all_of_it_is_used() -> None:
    engine = make_engine(budget=7)
    run(engine, *(make_request(f"r{i}", [i] * 20, 2) for i in range(3)))
    assert max(sizes_of(engine)) == 7
    assert sizes_of(engine)[:8] == [7] * 8


def test_max_num_seqs_counts_those_that_run_and_those_that_load() -> None:
    engine = make_engine(num_seqs=2)
    engine.submit(make_request("loading", [1] * 9, awaits={"blocks"}))
    for i in range(3):
        engine.submit(make_request(f"r{i}", [i] * 5))
    engine.step()
    stats = engine.stats()
    assert (stats.num_loading, stats.num_running, stats.num_waiting) == (1, 1, 2)
    engine.loading_done(make_request("loading", []).request_id)
    run(engine)
    assert max(len(plan.chunks) for plan in runner_of(engine).plans) == 2


def test_long_prefill_token_threshold_is_the_most_of_one_prompt_in_a_step() -> None:
    engine = make_engine(budget=64, threshold=5)
    run(engine, make_request("r", [1] * 18, 1))
    assert sizes_of(engine) == [5, 5, 5, 3]


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (0.2, 2), (0.25, 1)])
def test_watermark_is_kept_free_of_newcomers(watermark: float, num_running: int) -> None:
    """20 blocks of 4 tokens: each takes 8, so that 4 are left, which are 20 %."""
    engine = make_engine(num_blocks=20, watermark=watermark, budget=64, caching=False)
    engine.submit(make_request("first", [1] * 31, 40))
    engine.submit(make_request("second", [2] * 31, 40))
    engine.step()
    assert engine.stats().num_running == num_running


def test_who_runs_may_grow_into_the_watermark_and_who_is_alone_may_have_all() -> None:
    engine = make_engine(num_blocks=20, watermark=0.5, budget=100, caching=False)
    engine.submit(make_request("large", [1] * 70, 10))
    engine.step()
    assert engine.stats().num_free_blocks == 2
    run(engine)
    assert engine.stats().num_preemptions == 0
    assert max(sizes_of(engine)) == 70


def test_fcfs_knows_no_priorities() -> None:
    engine = make_engine(num_seqs=1)
    results = run(engine, make_request("late", [1], 1, priority=5), make_request("urgent", [2], 1, priority=-5))
    assert [output.request_id for result in results for output in result.outputs] == ["late", "urgent"]


def test_without_enable_prefix_caching_nothing_is_found_again_or_told() -> None:
    for caching in (True, False):
        engine = make_engine(caching=caching)
        results = [one for _ in range(2) for one in run(engine, make_request("r", list(range(20))))]
        assert (engine.stats().num_prefix_hits_tokens > 0) == caching
        assert any(result.stored for result in results) == caching
