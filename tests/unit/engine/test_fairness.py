"""Long prompts, short prompts, decoding and priorities beside each other: everybody gets on in a bounded time."""

import pytest

from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.preemption import Way
from kvasir.engine.request import Request
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import StepResult
from tests.fakes import FakeModelRunner, fake_tokens
from tests.unit.engine.test_engine import hash_of, make_request, runner_of

CHUNK = 16


class Clock:
    """Each step takes a second: it is read twice in a step."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


def engine_with(num_blocks: int = 200, **changes: object) -> Engine:
    options = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8, "max_model_len": 1000, "watermark": 0.0, **changes}
    limits = Limits(block_size=4, num_blocks=num_blocks, **options)
    return Engine(Scheduler(limits, b"fake-model"), FakeModelRunner(num_blocks, 4), clock=Clock())


def step_until(engine: Engine, request: Request, num_tokens: int = 1, most: int = 500) -> int:
    """How many steps until it has so many tokens."""
    for number in range(1, most + 1):
        engine.step()
        engine.check_invariants()
        if len(request.output_token_ids) >= num_tokens:
            return number
    raise AssertionError(f"{request.request_id} has {len(request.output_token_ids)} tokens after {most} steps")


def finish(engine: Engine) -> list[StepResult]:
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.check_invariants()
        assert len(results) < 2000, "no end in sight"
    return results


def chunks_of(engine: Engine, request: Request) -> list[int]:
    """Its tokens in each step."""
    return [sum(c.num_tokens for c in plan.chunks if c.request is request) for plan in runner_of(engine).plans]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(is_prefill: bool) -> None:
    """A policy of strictly one after the other made it wait for twenty chunks."""
    engine = engine_with()
    long = make_request("long", list(range(20 * CHUNK)), 4, hand_off=is_prefill)
    short = make_request("short", [7] * 10, 4, hand_off=is_prefill)
    engine.submit(long)
    engine.step()
    engine.submit(short)
    assert step_until(engine, short) <= 3
    for result in finish(engine):
        engine.release_blocks([block for report in result.computed for block in report.block_ids])
    num_steps = sum(num_tokens > 0 for num_tokens in chunks_of(engine, long)[: 20 + 2])
    assert num_steps <= 22, "what the short ones leave is for the long one"
    assert long.output_token_ids == fake_tokens(list(range(20 * CHUNK)), len(long.output_token_ids), hash_of("long"))


def test_alone_a_prompt_takes_all_of_each_step() -> None:
    engine = engine_with()
    engine.submit(make_request("long", list(range(20 * CHUNK)), 1))
    finish(engine)
    assert [plan.num_tokens for plan in runner_of(engine).plans] == [CHUNK] * 20


def test_many_long_prompts_leave_something_for_the_last() -> None:
    engine = engine_with(num_blocks=1000, max_num_batched_tokens=512)
    for i in range(3):
        engine.submit(make_request(f"long{i}", [i] * 900, 1))
    engine.submit(short := make_request("short", [9] * 4, 1))
    assert step_until(engine, short) == 1


def test_a_long_prompt_advances_beside_endless_decoding() -> None:
    """`decode if anything decodes` computed one chunk, then nothing until every decode had ended."""
    for target_itl_s in (0.0, 0.1):  # the second cannot be kept: each step takes a second
        engine = engine_with(target_itl_s=target_itl_s)
        decoding = [make_request(f"d{i}", [i] * 3, 500) for i in range(4)]
        for request in decoding:
            engine.submit(request)
        engine.step()
        engine.submit(long := make_request("long", list(range(10 * CHUNK)), 3))
        before = len(runner_of(engine).plans)
        num_steps = step_until(engine, long)
        assert all(chunks_of(engine, long)[before:]), "a step without a piece of it"
        assert num_steps <= 10 * CHUNK / 4
        for request in decoding:
            assert len(request.output_token_ids) == num_steps + 1, "a decode without its token"


def arrivals(engine: Engine, low: Request, every: int, most: int) -> int:
    """A steady flow of urgent requests that could fill the engine for ever; the steps until `low` has ended."""
    engine.submit(low)
    for number in range(most):
        if number % every == 0:
            urgent = make_request(f"u{number}", [number] * 8, 8, priority=-5, arrival_s=float(number))
            engine.submit(urgent)
        engine.step()
        engine.check_invariants()
        if low.request_id not in engine.scheduler.requests:
            return number
    return most


def test_low_priority_starves_without_aging_and_waits_a_bounded_time_with_it() -> None:
    options = {"scheduling_policy": "priority", "max_num_seqs": 1}
    low = {"prompt": [1] * 8, "max_tokens": 4, "priority": 0}
    assert arrivals(engine_with(**options), make_request("low", **low), 4, 300) == 300
    num_steps = arrivals(engine_with(**options, priority_aging_s=10.0), make_request("low", **low), 4, 300)
    assert num_steps < 200, "five levels of ten seconds, and those that had come by then"


def test_aging_keeps_the_order_of_those_who_come_together() -> None:
    engine = engine_with(scheduling_policy="priority", max_num_seqs=1, priority_aging_s=10.0)
    for name, priority, arrival_s in (("late", 0, 30.0), ("low", 2, 0.0), ("high", -1, 1.0), ("mid", 0, 1.0)):
        engine.submit(make_request(name, [1], 1, priority=priority, arrival_s=arrival_s))
    ended = [output.request_id for result in finish(engine) for output in result.outputs]
    assert ended == ["high", "mid", "low", "late"]


def test_who_is_preempted_by_priority_ends_later_with_the_right_text() -> None:
    engine = engine_with(num_blocks=12, scheduling_policy="priority")
    plain = [make_request(f"p{i}", [i] * 8, 16) for i in range(2)]
    for request in plain:
        engine.submit(request)
    engine.step()
    engine.submit(urgent := make_request("urgent", [9] * 16, 16, priority=-10))
    ended = [o.request_id for result in finish(engine) for o in result.outputs if o.finish_reason]
    assert ended[0] == "urgent" or engine.stats().num_preemptions == 0
    assert engine.stats().num_preemptions > 0
    for request in (*plain, urgent):
        expected = fake_tokens(request.prompt_token_ids, 16, hash_of(request.request_id))
        assert request.output_token_ids == expected


def test_so_many_prompts_may_be_partly_computed() -> None:
    engine = engine_with(long_prefill_token_threshold=4, max_num_partial_prefills=2)
    for i in range(4):
        engine.submit(make_request(f"r{i}", [i] * 40, 2))
    for _ in range(9):
        engine.step()
        assert engine.stats().num_running <= 2
    finish(engine)
    assert max(len(plan.chunks) for plan in runner_of(engine).plans) <= 4


def test_long_prompts_are_passed_by_short_ones_while_enough_of_them_have_begun() -> None:
    engine = engine_with(long_prefill_token_threshold=4, max_long_partial_prefills=1)
    longs = [make_request(f"long{i}", [i] * 60, 2) for i in range(2)]
    for request in longs:
        engine.submit(request)
    engine.submit(short := make_request("short", [9] * 4, 2))
    assert step_until(engine, short) == 1
    assert longs[1].num_computed_tokens == 0
    finish(engine)
    assert all(len(request.output_token_ids) == 2 for request in longs)


@pytest.mark.parametrize("most", [{"num": 2}, {"long": 2}, {"num": 3, "long": 2}])
def test_so_it_is_with_prompts_that_have_their_seats_before_they_are_computed(most: dict[str, int]) -> None:
    """On a decode node all of them await the router's word; it was only those without a seat that were counted. A long
    one that is passed has not begun: it was among those that were too many for the short one."""
    limits = {f"max_{kind}_partial_prefills": number for kind, number in most.items()}
    engine = engine_with(long_prefill_token_threshold=4, **limits)
    longs = [make_request(f"long{i}", [i] * 20, 2, awaits={"continue"}) for i in range(4)]
    for request in longs:
        engine.submit(request)
    engine.submit(short := make_request("short", [9] * 4, 2, awaits={"continue"}))
    engine.step()
    assert engine.stats().num_loading == 5
    for request in reversed((*longs, short)):
        engine.continue_with(request.request_id, [])
    short_ended = step_until(engine, short)
    assert short_ended == 1 if "long" in most else short_ended > 5
    finish(engine)
    for plan in runner_of(engine).plans:
        assert sum(chunk.request in longs and chunk.end < 20 for chunk in plan.chunks) <= 2
    assert all(len(request.output_token_ids) == 2 for request in longs)


def test_so_it_is_with_one_that_was_preempted_and_finds_all_it_would_fetch() -> None:
    """It comes back as one that awaits blocks, of which none is missing; it did not look who had begun."""
    engine = engine_with(max_num_partial_prefills=1)
    first = make_request("first", [1] * 60, 2, awaits={"continue"})
    preempted = make_request("preempted", [2] * 9, 8)
    for request in (first, preempted):
        engine.submit(request)
    step_until(engine, preempted, 2)
    engine.continue_with(first.request_id, [])
    engine.step()
    preempted.num_stored_tokens = 8
    engine.scheduler._preempt(preempted, Way.FETCH)
    num_steps = len(runner_of(engine).plans)
    step_until(engine, first)
    assert not any(chunks_of(engine, preempted)[num_steps:-1]), "begun beside the one that had begun"
    finish(engine)
    assert preempted.output_token_ids == fake_tokens([2] * 9, 8, hash_of("preempted"))


def test_limits_that_make_no_sense() -> None:
    for name in ("max_num_partial_prefills", "priority_aging_s", "target_itl_s", "long_prefill_token_threshold"):
        with pytest.raises(ValueError, match=name):
            engine_with(**{name: -1})
    for name in ("priority_aging_s", "target_itl_s"):
        with pytest.raises(ValueError, match=name):
            engine_with(**{name: float("inf")})  # type: ignore[arg-type]
