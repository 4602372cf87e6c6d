"""The engine over a fake model: what is cut how must not show in the output."""

import pytest

from kvasir.common.errors import InvalidRequest, NumericalError
from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.stats import StepMetrics
from kvasir.engine.step import StepResult
from tests.fakes import FakeModelRunner

MAX_STEPS = 2000


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 4096,
    num_seqs: int = 8,
    max_model_len: int = 4096,
    threshold: int = 0,
    caching: bool = True,
    watermark: float = 0.01,
    policy: str = "fcfs",
) -> Engine:
    limits = Limits(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=num_seqs,
        max_model_len=max_model_len,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=caching,
        watermark=watermark,
        scheduling_policy=policy,
    )
    return Engine(Scheduler(limits, b"fake-model"), FakeModelRunner(num_blocks, block_size))


def runner_of(engine: Engine) -> FakeModelRunner:
    assert isinstance(engine.model_runner, FakeModelRunner)
    return engine.model_runner


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=hash_of(name))
    return Request(**{"request_id": RequestId(name), "prompt_token_ids": list(prompt), "sampling": sampling, **fields})


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**i for i, letter in enumerate(name))


def run(engine: Engine, *requests: Request) -> list[StepResult]:
    """Submit all, step until nothing is left to do."""
    for request in requests:
        engine.submit(request)
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.check_invariants()
        assert len(results) < MAX_STEPS, "no end in sight"
    return results


def outputs_of(results: list[StepResult], name: str) -> tuple[list[int], list[FinishReason]]:
    mine = [output for result in results for output in result.outputs if output.request_id == name]
    return [t for output in mine for t in output.token_ids], [o.finish_reason for o in mine if o.finish_reason]


def run_alone(prompt: list[int], max_tokens: int = 8, name: str = "r", **options: int) -> list[int]:
    engine = make_engine(**options)
    tokens, _ = outputs_of(run(engine, make_request(name, prompt, max_tokens)), name)
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    return tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 12, 22])
def test_output_does_not_depend_on_chunk_size_or_block_size(length: int) -> None:
    prompt = list(range(1, length + 1))
    whole = run_alone(prompt)
    assert len(whole) == 8
    for budget in (1, 3, 4, 7, 22):
        assert run_alone(prompt, budget=budget) == whole
    for block_size in (1, 2, 16):
        assert run_alone(prompt, block_size=block_size) == whole
    assert run_alone(prompt, threshold=3) == whole


def test_the_same_prompt_again_is_cached_but_for_its_last_token() -> None:
    """Whole-prompt hits must still compute one token, and not on top of a block that others read."""
    for length in (11, 12, 13):
        prompt = list(range(length))
        engine = make_engine()
        first, _ = outputs_of(run(engine, make_request("r", prompt)), "r")
        for _ in range(2):
            again = run(engine, make_request("r", prompt))
            admitted = [one for result in again for one in result.admitted]
            assert [one.num_cached_tokens for one in admitted] == [(length - 1) // 4 * 4]
            assert outputs_of(again, "r")[0] == first


def test_requests_do_not_influence_each_other() -> None:
    prompts = {f"r{i}": list(range(i, i + 3 + 5 * i)) for i in range(6)}
    engine = make_engine(budget=16, num_seqs=4)
    results = run(engine, *(make_request(name, prompt) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert outputs_of(results, name)[0] == run_alone(prompt, name=name)


def test_preemption_changes_no_output() -> None:
    prompts = {f"r{i}": list(range(100 * i, 100 * i + 9)) for i in range(4)}
    engine = make_engine(num_blocks=14)
    results = run(engine, *(make_request(name, prompt, 20) for name, prompt in prompts.items()))
    assert engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert outputs_of(results, name)[0] == run_alone(prompt, 20, name=name)


def test_a_request_beyond_an_empty_cache_is_refused_and_blocks_nobody() -> None:
    engine = make_engine(num_blocks=4)
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(make_request("long", list(range(17))))
    assert refused.value.code == "context_length_exceeded"
    assert outputs_of(run(engine, make_request("hi", [1])), "hi")[0]


def test_a_request_that_outgrows_the_cache_ends_by_length() -> None:
    """It used to be a way to hang: alone, with every block its own, and in need of one more."""
    engine = make_engine(num_blocks=4)
    results = run(engine, make_request("r", list(range(12)), 100), make_request("s", list(range(9)), 100))
    tokens, reasons = outputs_of(results, "r")
    assert reasons == [FinishReason.LENGTH]
    assert len(tokens) == 5, "16 tokens in the cache, and one more that is only sampled"
    assert len(outputs_of(results, "s")[0]) == 8


def test_model_length_ends_a_request() -> None:
    engine = make_engine(max_model_len=10)
    results = run(engine, make_request("r", list(range(7)), 100))
    assert len(outputs_of(results, "r")[0]) == 3
    with pytest.raises(InvalidRequest):
        engine.submit(make_request("s", list(range(10))))


def test_a_stop_token_ends_the_request_and_is_reported() -> None:
    prompt = [5, 6, 7]
    plain = run_alone(prompt)
    request = make_request("r", prompt)
    request.sampling = SamplingParams(max_tokens=8, seed=hash_of("r"), stop_token_ids=frozenset({plain[2]}))
    tokens, reasons = outputs_of(run(make_engine(), request), "r")
    assert tokens == plain[:3]
    assert reasons == [FinishReason.STOP]


def test_outputs_that_came_with_a_request_count_and_are_continued() -> None:
    prompt = [1, 2, 3, 4, 5]
    whole = run_alone(prompt)
    moved = make_request("r", prompt, output_token_ids=whole[:3])
    tokens, reasons = outputs_of(run(make_engine(), moved), "r")
    assert tokens == whole[3:]
    assert reasons == [FinishReason.LENGTH]


def test_non_finite_logits_fail_one_request_and_its_blocks_are_not_found_again() -> None:
    prompt = list(range(12))
    engine = make_engine(budget=8)
    runner_of(engine).non_finite.add(RequestId("bad"))
    results = run(engine, make_request("bad", prompt), make_request("good", [1, 2]))
    failed = [one for result in results for one in result.failed]
    assert [one.request_id for one in failed] == ["bad"]
    assert isinstance(failed[0].error, NumericalError)
    assert len(outputs_of(results, "good")[0]) == 8
    admitted = [one for result in run(engine, make_request("next", prompt)) for one in result.admitted]
    assert [one.num_cached_tokens for one in admitted] == [0]


def test_a_hand_off_does_not_end_where_only_its_prefill_node_is_full() -> None:
    """One token under the prefill node's own length, an answer once ended with its first token."""
    prompt = list(range(8))
    for limits in ({"max_model_len": 9}, {"num_blocks": 2}):
        for max_tokens, reason in ((8, FinishReason.HANDED_OFF), (1, FinishReason.LENGTH)):
            engine = make_engine(**limits)
            results = run(engine, make_request("r", prompt, max_tokens, hand_off=True))
            assert outputs_of(results, "r") == (run_alone(prompt, 1), [reason])


def test_decode_goes_before_prefill() -> None:
    engine = make_engine(budget=4, threshold=2)
    engine.submit(make_request("short", [1], 20))
    engine.step()
    engine.submit(make_request("long", list(range(20))))
    for _ in range(5):
        outputs = engine.step().outputs
        assert [output.request_id for output in outputs] == ["short"]


def test_priority_lower_is_earlier() -> None:
    engine = make_engine(policy="priority", num_seqs=1)
    results = run(
        engine,
        make_request("low", [1], 1, priority=5),
        make_request("high", [2], 1, priority=-5),
        make_request("middle", [3], 1),
    )
    finished = [output.request_id for result in results for output in result.outputs]
    assert finished == ["high", "middle", "low"]


def test_the_watermark_holds_back_newcomers_only() -> None:
    engine = make_engine(num_blocks=10, watermark=0.5)
    engine.submit(make_request("first", list(range(16)), 20))
    engine.submit(make_request("second", [1] * 8, 2))
    engine.step()
    assert engine.stats().num_running == 1, "second would leave fewer than 5 blocks free"
    results = run(engine)
    assert len(outputs_of(results, "second")[0]) == 2


def test_steps_and_stats_are_observable() -> None:
    engine = make_engine(budget=4)
    seen: list[StepMetrics] = []
    engine.on_step = seen.append
    engine.submit(make_request("r", list(range(6)), 3))
    assert engine.stats().num_queued_tokens == 6
    results = run(engine)
    assert [(m.num_prefill_tokens, m.num_decode_tokens) for m in seen] == [(4, 0), (2, 0), (0, 1), (0, 1)]
    assert [len(m.queue_s) for m in seen] == [1, 0, 0, 0]
    stats = engine.stats()
    assert (stats.step, stats.num_prompt_tokens_computed, stats.num_generation_tokens) == (4, 6, 3)
    assert [result.step for result in results] == [1, 2, 3, 4]


def test_stored_and_dropped_tell_what_the_cache_holds() -> None:
    engine = make_engine(num_blocks=6)
    known: set[bytes] = set()
    for i in range(6):
        for result in run(engine, make_request(f"r{i}", list(range(i, i + 9)), 6)):
            assert known.issuperset(result.dropped)
            known.difference_update(result.dropped)
            assert known.isdisjoint(result.stored)
            known.update(result.stored)
    assert known == set(engine.scheduler.tables.cache.snapshot())
    assert known
