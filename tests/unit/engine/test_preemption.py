"""Who gives way when blocks run out."""

from kvasir.engine.engine import Engine
from kvasir.engine.open_plan import OpenPlan
from kvasir.engine.preemption import Choice, Way
from kvasir.engine.request import Phase
from kvasir.engine.step import Chunk
from tests.fakes import fake_tokens
from tests.unit.engine.test_engine import hash_of, make_engine, make_request, outputs_of, run, runner_of


def until_preempted(engine: Engine) -> None:
    while engine.stats().num_preemptions == 0:
        engine.step()
        engine.check_invariants()


def test_the_last_come_gives_way() -> None:
    engine = make_engine(num_blocks=6, watermark=0)
    first, second = make_request("first", [1] * 8, 12), make_request("second", [2] * 8, 12)
    engine.submit(first)
    engine.submit(second)
    until_preempted(engine)
    assert (first.phase, second.phase) == (Phase.RUNNING, Phase.WAITING)


def test_the_lowest_priority_gives_way_even_if_it_came_first() -> None:
    engine = make_engine(num_blocks=6, watermark=0, policy="priority")
    first, second = make_request("first", [1] * 8, 12, priority=1), make_request("second", [2] * 8, 12)
    engine.submit(first)
    engine.submit(second)
    until_preempted(engine)
    assert (first.phase, second.phase) == (Phase.WAITING, Phase.RUNNING)


def test_a_preempted_request_goes_before_newcomers() -> None:
    engine = make_engine(num_blocks=6, watermark=0)
    requests = [make_request(name, [i] * 8, 12) for i, name in enumerate(("first", "second", "third"))]
    finished = [o.request_id for r in run(engine, *requests) for o in r.outputs if o.finish_reason]
    assert finished == ["first", "second", "third"]
    assert requests[1].num_preemptions == 1


def test_prompts_that_do_not_fit_together_preempt_nobody() -> None:
    """Each was admitted for room that the one before had not taken yet, and lost what it had computed in it."""
    engine = make_engine(num_blocks=10, budget=8, threshold=4, watermark=0)
    requests = [make_request(f"r{i}", [i] * 24, 1) for i in range(3)]
    run(engine, *requests)
    assert all(len(request.output_token_ids) == 1 for request in requests)
    assert engine.stats().num_preemptions == 0
    assert sum(plan.num_tokens for plan in runner_of(engine).plans) == 3 * 24


def test_one_that_was_in_the_plan_already_leaves_it() -> None:
    """A long urgent prompt, half computed, takes the blocks of a decoding request that had its turn in this step."""
    engine = make_engine(num_blocks=8, budget=5, watermark=0, policy="priority")
    low = make_request("low", [1] * 3, 20, priority=1)
    high = make_request("high", [2] * 24, 2)
    engine.submit(low)
    engine.step()
    engine.submit(high)
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.check_invariants()
    assert low.num_preemptions == 1
    plans = runner_of(engine).plans
    taken = next(plan for plan in plans if all(chunk.request is high for chunk in plan.chunks))
    assert taken.num_tokens == 4, "planned before a token of the budget was given back"
    assert all(plan.num_tokens <= 5 for plan in plans)
    assert outputs_of(results, "high")[0] == fake_tokens([2] * 24, 2, hash_of("high"))
    assert low.output_token_ids == fake_tokens([1] * 3, 20, hash_of("low"))


def test_a_dropped_chunk_gives_its_budget_back() -> None:
    plan = OpenPlan(budget=10)
    request = make_request("r", [1] * 8)
    plan.add(Chunk(request, 0, 8))
    assert plan.budget == 2
    plan.drop(request)
    plan.drop(request)
    assert (plan.budget, plan.chunks) == (10, {})


def test_an_urgent_prompt_does_not_stall_a_decode() -> None:
    engine = make_engine(budget=4, policy="priority")
    engine.submit(make_request("decoding", [1], 20, priority=5))
    engine.step()
    engine.submit(make_request("urgent", list(range(20))))
    for _ in range(5):
        assert [output.request_id for output in engine.step().outputs][:1] == ["decoding"]


def test_room_above_the_cached_part_is_counted_right() -> None:
    """Cached blocks that are free are about to be held: they are no room for the rest of the prompt."""
    engine = make_engine(num_blocks=4)
    run(engine, make_request("warm", [1] * 8, 1))
    engine.submit(make_request("other", [2] * 4, 2))
    engine.step()
    engine.submit(make_request("same", [1] * 15, 1))
    engine.step()
    engine.check_invariants()
    assert engine.stats().num_waiting == 1
    assert len(outputs_of(run(engine), "same")[0]) == 1


def test_a_cheap_one_of_higher_priority_does_not_give_way_for_a_dear_one_of_the_lowest() -> None:
    engine = make_engine(policy="priority")
    urgent, cheap = make_request("urgent", [1] * 4), make_request("cheap", [2] * 5, priority=1)
    dear = make_request("dear", [3] * 9, priority=2)
    for request in (urgent, cheap, dear):
        engine.submit(request)
    engine.step()
    engine.scheduler.choose_way = lambda loss, rates, num_host: Choice(Way.RECOMPUTE, 1.0 * (loss.num_tokens > 5))
    assert engine.scheduler._choose_victim(urgent) == (dear, Way.RECOMPUTE)


def test_what_is_still_here_when_it_comes_back_is_not_waited_for() -> None:
    """None of its blocks is missing, so that no transfer will ever say that it is done."""
    engine, request = make_engine(), make_request("r", list(range(9)))
    engine.submit(request)
    first = engine.step()
    request.num_stored_tokens = 8
    engine.scheduler._preempt(request, Way.FETCH)
    assert outputs_of([first, *run(engine)], "r")[0] == fake_tokens(list(range(9)), 8, hash_of("r"))
