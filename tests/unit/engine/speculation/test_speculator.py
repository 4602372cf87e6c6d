"""What drafts may take, and what is left of them when they are wrong."""

from collections.abc import Sequence

import pytest

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.blocks import num_blocks_for
from kvasir.engine.engine import Engine
from kvasir.engine.request import FinishReason, Phase, Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.speculation.speculator import Speculator
from kvasir.engine.step import StepPlan, StepResult
from tests.fakes import fake_kv, fake_tokens
from tests.unit.engine.drafting import WRONG, Always
from tests.unit.engine.test_engine import make_engine, make_request, outputs_of, run, runner_of

PROMPT = [5, 6, 7, 8, 9]  # blocks of 4


class Scripted:
    """Right for the first `num_right` drafts of each step, then wrong."""

    def __init__(self, num_right: int) -> None:
        self.num_right = num_right
        self.asked: list[list[int]] = []

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[RequestId, list[int]]:
        self.asked.append([most for _, most in wanted])
        proposed = {}
        for request, most in wanted:
            future = fake_tokens(request.token_ids, most, request.sampling.seed)
            proposed[request.request_id] = future[: self.num_right] + [WRONG] * (most - self.num_right)
        return proposed


def speculating(num_drafts: int, num_right: int, **options: object) -> tuple[Engine, Scripted]:
    engine = make_engine(**options)  # type: ignore[arg-type]
    proposer = Scripted(num_right)
    engine.speculator = Speculator(proposer, engine.scheduler, num_drafts, Always())
    return engine, proposer


def drafts_of(plan: StepPlan) -> list[int]:
    return [chunk.num_drafts for chunk in plan.chunks]


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_right_drafts_are_several_tokens_a_step(num_right: int) -> None:
    engine, _ = speculating(3, num_right)
    request = make_request("r", PROMPT, 13)
    results = run(engine, request)
    assert outputs_of(results, "r") == (fake_tokens(PROMPT, 13, request.sampling.seed), [FinishReason.LENGTH])
    sizes = [len(output.token_ids) for result in results for output in result.outputs]
    assert sizes[:2] == [1, 1 + num_right]
    stats = engine.stats()
    assert stats.num_generation_tokens == 13
    assert stats.num_accepted_tokens == 13 - len(sizes)
    assert stats.num_drafts == sum(any(drafts_of(plan)) for plan in runner_of(engine).plans)
    assert stats.num_draft_tokens == sum(sum(drafts_of(plan)) for plan in runner_of(engine).plans)


def test_never_more_than_the_request_may_have() -> None:
    """Nothing is drafted that could not be kept with a token of the request's own behind it."""
    engine, proposer = speculating(4, 4)
    run(engine, make_request("r", PROMPT, 9))
    assert proposer.asked == [[4], [2]], "9 tokens: 1, 5, 3"
    engine, proposer = speculating(4, 4, max_model_len=10)
    tokens, reasons = outputs_of(run(engine, make_request("r", PROMPT, 50)), "r")
    assert (len(tokens), reasons) == (5, [FinishReason.LENGTH])
    assert proposer.asked == [[3]]


def test_a_stop_token_among_the_drafts_is_the_end() -> None:
    future = fake_tokens(PROMPT, 10)
    engine, _ = speculating(5, 5)
    sampling = SamplingParams(max_tokens=10, stop_token_ids=frozenset({future[3]}))
    results = run(engine, Request(request_id=RequestId("r"), prompt_token_ids=PROMPT, sampling=sampling))
    assert outputs_of(results, "r") == (future[:4], [FinishReason.STOP])
    assert engine.stats().num_generation_tokens == 4


def test_drafts_take_what_is_left_of_a_step() -> None:
    """Two decode, and a prompt comes: first the two, then as much of the prompt as there is, then drafts."""
    engine, _ = speculating(3, 3, budget=8)
    run_until_decoding(engine, make_request("a", [1, 2, 3], 30), make_request("b", [4, 5, 6], 30))
    engine.submit(make_request("c", list(range(20, 40)), 2))
    engine.step()
    plan = runner_of(engine).plans[-1]
    assert [chunk.num_tokens for chunk in plan.chunks] == [1, 1, 6]
    run(engine)
    assert max(plan.num_tokens for plan in runner_of(engine).plans) == 8
    beside = [plan for plan in runner_of(engine).plans if any(drafts_of(plan)) and len(plan.chunks) == 2]
    assert [chunk.num_tokens for chunk in beside[0].chunks] == [4, 4]


def run_until_decoding(engine: Engine, *requests: Request) -> list[StepResult]:
    for request in requests:
        engine.submit(request)
    return [engine.step()]


def test_blocks_above_the_watermark_only_and_none_while_somebody_waits() -> None:
    engine, _ = speculating(8, 0, num_blocks=8, watermark=0.5)
    run_until_decoding(engine, one := make_request("r", PROMPT, 20))
    assert len(one.block_table) == 2
    engine.step()
    assert drafts_of(runner_of(engine).plans[-1]) == [8]
    assert (len(one.block_table), engine.stats().num_free_blocks) == (4, 4)
    engine.step()
    assert drafts_of(runner_of(engine).plans[-1]) == [8], "blocks of what was not kept are used again"
    assert len(one.block_table) == 4
    engine.step()
    engine.step()
    assert drafts_of(runner_of(engine).plans[-1]) == [7], "the rest of the last block, at the watermark"
    engine.submit(make_request("waits", list(range(30, 60)), 2))
    engine.step()
    assert len(one.block_table) == 3, "nothing beyond its tokens while somebody waits"
    engine.check_invariants()


def test_what_was_wrong_is_found_by_nobody() -> None:
    """Registered and reported are the blocks of what was kept, with their true content."""
    engine, _ = speculating(6, 2)
    request = make_request("r", PROMPT, 17, reports_filled=True)
    reports = [report for result in run_to_end(engine, request) for report in result.computed]
    whole = request.token_ids[:-1]
    hashes = block_hashes(root_hash(b"fake-model"), whole, 4)
    assert len(engine.scheduler.tables.cache.match(hashes)) == len(whole) // 4 == 5
    assert [one for report in reports for one in report.hashes] == hashes
    values = fake_kv(whole)
    for report in reports:
        for i, block in enumerate(report.block_ids, start=report.first_index):
            assert list(runner_of(engine).kv[block]) == values[4 * i : 4 * i + 4]
        engine.release_blocks(report.block_ids)
    assert engine.stats().num_free_blocks == 64
    assert set(engine.scheduler.tables.cache.snapshot()) == set(hashes)


def run_to_end(engine: Engine, request: Request) -> list[StepResult]:
    engine.submit(request)
    results = []
    while engine.has_work:
        results.append(engine.step())
        engine.check_invariants()
    return results


def test_a_request_that_is_cancelled_leaves_nothing() -> None:
    engine, _ = speculating(8, 8)
    run_until_decoding(engine, make_request("r", PROMPT, 50))
    engine.step()
    engine.cancel(RequestId("r"))
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 64
    assert not engine.has_work


def test_with_forks_each_has_its_own_drafts() -> None:
    engine, _ = speculating(3, 2)
    leader = make_request("s0", PROMPT, 12)
    leader.forks = [make_request(f"s{i}", PROMPT, 12) for i in (1, 2)]
    results = run_to_end(engine, leader)
    for i in range(3):
        seed = make_request(f"s{i}", PROMPT).sampling.seed
        assert outputs_of(results, f"s{i}")[0] == fake_tokens(PROMPT, 12, seed)
    assert engine.stats().num_prompt_tokens_computed == 5
    assert engine.stats().num_accepted_tokens > 12


def test_a_prompt_a_score_and_a_hand_off_have_none() -> None:
    engine, proposer = speculating(3, 3)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=1)
    run_to_end(engine, Request(request_id=RequestId("s"), prompt_token_ids=PROMPT, sampling=scored))
    results = run_to_end(engine, make_request("h", [1], 8, hand_off=True))
    assert outputs_of(results, "h")[1] == [FinishReason.HANDED_OFF]
    assert proposer.asked == []


def test_under_pressure_nobody_is_preempted_for_a_draft() -> None:
    def preemptions(num_drafts: int) -> int:
        engine, _ = speculating(num_drafts, num_drafts // 2, num_blocks=12)
        requests = [make_request(f"r{i}", [i] * 5, 24) for i in range(3)]
        results = run(engine, *requests)
        for one in requests:
            assert outputs_of(results, one.request_id)[0] == fake_tokens(one.prompt_token_ids, 24, one.sampling.seed)
        return engine.stats().num_preemptions

    assert preemptions(1) > 0
    assert preemptions(6) <= preemptions(1)


def test_drafts_count_as_decoding() -> None:
    engine, _ = speculating(3, 3)
    seen = []
    engine.on_step = lambda metrics: seen.append((metrics.num_prefill_tokens, metrics.num_decode_tokens))
    run(engine, make_request("r", PROMPT, 6))
    assert seen == [(5, 0), (0, 4), (0, 1)]


def test_blocks_of_wrong_drafts_are_taken_back_before_anybody_waits_or_gives_way() -> None:
    """All fit; only what was reserved for drafts stands in the way, of a newcomer first, then of one that grows."""
    engine, _ = speculating(16, 0, num_blocks=12, watermark=0)
    run_until_decoding(engine, one := make_request("one", PROMPT, 100))
    engine.step()
    assert len(one.block_table) > num_blocks_for(one.num_tokens, 4)
    engine.submit(other := make_request("other", list(range(20, 48)), 100))
    engine.step()
    assert other.phase is Phase.RUNNING
    while one.num_tokens + other.num_tokens < 44:
        engine.step()
        engine.check_invariants()
    assert engine.stats().num_preemptions == 0
