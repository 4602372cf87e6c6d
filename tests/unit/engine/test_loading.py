"""Blocks and first tokens that come from elsewhere; blocks that go elsewhere."""

import pytest

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.request import FinishReason, Phase, Request, RequestId
from kvasir.engine.step import ComputedBlocks
from tests.fakes import FakeBlockMemory, fake_kv, fake_tokens
from tests.unit.engine.test_engine import hash_of, make_engine, make_request, outputs_of, run, runner_of

ID = RequestId("r")


def awaiting(prompt: list[int], **fields: object) -> Request:
    return make_request("r", prompt, **{"awaits": {"blocks", "continue"}, **fields})


def land(engine: Engine, request: Request, *indices: int) -> None:
    """What a transfer does: fill the blocks, then say so."""
    kv = runner_of(engine).kv
    block_size = kv.shape[1]
    for index in indices:
        values = fake_kv(request.prompt_token_ids)[index * block_size : (index + 1) * block_size]
        kv[request.block_table[index], : len(values)] = values
        engine.block_loaded(ID, index)


def begin_loading(engine: Engine, request: Request) -> tuple[int, ...]:
    engine.submit(request)
    (admitted,) = engine.step().admitted
    assert request.phase is Phase.LOADING
    assert not engine.has_work, "a loading request is nothing to do"
    return admitted.missing


def expected(prompt: list[int], num_tokens: int = 8) -> list[int]:
    return fake_tokens(prompt, num_tokens, hash_of("r"))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_loaded_prompt_costs_no_computing(length: int) -> None:
    prompt = list(range(length))
    engine, request = make_engine(), awaiting(prompt)
    missing = begin_loading(engine, request)
    assert missing == tuple(range(-(-length // 4)))
    land(engine, request, *reversed(missing))
    engine.loading_done(ID)
    assert not engine.has_work, "nothing is generated before the router says so"
    engine.continue_with(ID, expected(prompt)[:1])
    tokens, _ = outputs_of(run(engine), "r")
    assert tokens == expected(prompt)[1:]
    stats = engine.stats()
    assert (stats.num_prompt_tokens_computed, stats.num_recomputed_tokens) == (0, 0)


@pytest.mark.parametrize("length", [1, 8, 11])
def test_without_a_first_token_only_the_last_one_is_computed_again(length: int) -> None:
    prompt = list(range(length))
    engine, request = make_engine(), awaiting(prompt)
    land(engine, request, *begin_loading(engine, request))
    engine.continue_with(ID, [])
    engine.loading_done(ID)
    assert outputs_of(run(engine), "r")[0] == expected(prompt)
    assert engine.stats().num_recomputed_tokens == 1


def test_only_the_holes_are_computed() -> None:
    """15 tokens: blocks 1 and the partial 3 have landed, 0 and 2 have not."""
    prompt = list(range(15))
    engine, request = make_engine(), awaiting(prompt)
    begin_loading(engine, request)
    land(engine, request, 3, 1)
    engine.continue_with(ID, expected(prompt)[:1])
    engine.loading_done(ID)
    assert outputs_of(run(engine), "r")[0] == expected(prompt)[1:]
    assert engine.stats().num_recomputed_tokens == 8
    assert runner_of(engine).plans[0].num_tokens == 4


def test_several_first_tokens_may_come() -> None:
    prompt = list(range(7))
    engine, request = make_engine(), awaiting(prompt)
    land(engine, request, *begin_loading(engine, request))
    engine.loading_done(ID)
    engine.continue_with(ID, expected(prompt)[:3])
    assert outputs_of(run(engine), "r")[0] == expected(prompt)[3:]
    assert engine.stats().num_recomputed_tokens == 0


def test_the_first_token_may_come_before_the_seat() -> None:
    prompt = list(range(8))
    engine, request = make_engine(num_seqs=1), awaiting(prompt)
    engine.submit(make_request("before", [1], 2))
    engine.submit(request)
    engine.continue_with(ID, expected(prompt)[:1])
    while request.phase is not Phase.LOADING:
        engine.step()
    land(engine, request, 0, 1)
    engine.loading_done(ID)
    assert outputs_of(run(engine), "r")[0] == expected(prompt)[1:]
    assert engine.stats().num_recomputed_tokens == 0


def test_cached_blocks_are_not_asked_for() -> None:
    prompt = list(range(10))
    engine = make_engine()
    run(engine, make_request("warm", prompt))
    request = awaiting(prompt)
    assert begin_loading(engine, request) == (2,)
    land(engine, request, 2)
    engine.loading_done(ID)
    engine.continue_with(ID, expected(prompt)[:1])
    assert outputs_of(run(engine), "r")[0] == expected(prompt)[1:]
    assert engine.stats().num_recomputed_tokens == 0


def test_a_cancelled_load_keeps_its_blocks_until_the_transfer_has_stopped() -> None:
    engine, request = make_engine(), awaiting(list(range(8)))
    begin_loading(engine, request)
    engine.cancel(ID)
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 62
    engine.continue_with(ID, [1])
    engine.loading_done(ID)
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 64
    assert not engine.has_work


def test_what_is_said_of_a_load_after_its_end_is_not_heard() -> None:
    """Its blocks are another's by then."""
    engine, request = make_engine(num_blocks=2), awaiting(list(range(8)))
    begin_loading(engine, request)
    engine.cancel(ID)
    engine.loading_done(ID)
    engine.submit(make_request("other", [9] * 5))
    results = [engine.step()]
    engine.block_loaded(ID, 0)
    engine.loading_done(ID)
    engine.continue_with(ID, [1])
    engine.check_invariants()
    assert outputs_of([*results, *run(engine)], "other")[0] == fake_tokens([9] * 5, 4, hash_of("other"))
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 2


def test_a_first_token_that_fills_the_length_ends_it_but_not_the_transfer() -> None:
    engine = make_engine(num_blocks=2)
    request = awaiting(list(range(8)))
    begin_loading(engine, request)
    engine.continue_with(ID, [5])
    assert engine.stats().num_free_blocks == 0, "the transfer still writes"
    assert outputs_of(run(engine), "r") == ([], [FinishReason.LENGTH])
    engine.loading_done(ID)
    assert engine.stats().num_free_blocks == 2


def test_what_landed_counts_no_more_after_a_preemption() -> None:
    """Blocks 1 to 3 have landed beyond a hole when the blocks are taken away: stale marks would skip garbage."""
    engine = make_engine(num_blocks=6, budget=2, policy="priority", caching=False)
    prompt = list(range(13))
    request = awaiting(prompt, priority=1)
    engine.submit(make_request("first", [1, 2, 3], 12))
    engine.submit(request)
    engine.step()
    land(engine, request, 1, 2, 3)
    engine.continue_with(ID, expected(prompt)[:1])
    while request.num_preemptions == 0:
        if len(engine.scheduler.requests["first"].output_token_ids) == 5:
            engine.loading_done(ID)
        engine.step()
    assert not request.loaded_blocks
    assert outputs_of(run(engine), "r")[0] == expected(prompt)[1:]
    assert engine.stats().num_recomputed_tokens <= 4, "the hole; what a preemption costs is counted elsewhere"


def test_nothing_stands_between_a_loaded_request_and_its_seat() -> None:
    engine = make_engine(num_seqs=1)
    request = awaiting(list(range(4)))
    begin_loading(engine, request)
    engine.submit(make_request("newcomer", [1]))
    engine.step()
    assert engine.stats().num_waiting == 1


def reports_of(engine: Engine, request: Request) -> list[ComputedBlocks]:
    return [report for result in run(engine, request) for report in result.computed]


def test_a_prompt_is_handed_off_chunk_by_chunk() -> None:
    prompt = list(range(10))
    engine = make_engine(budget=4)
    request = make_request("r", prompt, hand_off=True)
    results = run(engine, request)
    assert outputs_of(results, "r") == (expected(prompt, 1), [FinishReason.HANDED_OFF])
    reports = [report for result in results for report in result.computed]
    assert [(r.first_index, r.num_tokens, r.is_last) for r in reports] == [
        (0, (4,), False),
        (1, (4,), False),
        (2, (2,), True),
    ]
    hashes = block_hashes(root_hash(b"fake-model"), prompt, 4)
    assert [report.hashes for report in reports] == [(hashes[0],), (hashes[1],), (None,)]
    assert engine.stats().num_free_blocks == 61, "reported blocks are held until they are released"
    for report in reports:
        engine.release_blocks(report.block_ids)
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 64


def test_cached_blocks_are_reported_before_the_forward_pass() -> None:
    prompt = list(range(10))
    engine = make_engine()
    run(engine, make_request("warm", prompt))
    early = []
    engine.on_newcomers = early.append
    late = reports_of(engine, make_request("r", prompt, hand_off=True))
    assert [(r.first_index, r.num_tokens, r.is_last) for r in early[0].computed] == [(0, (4, 4), False)]
    assert [(r.first_index, r.num_tokens, r.is_last) for r in late] == [(2, (2,), True)]


def test_who_finds_no_room_is_told_so_once() -> None:
    engine = make_engine(num_blocks=4)
    engine.submit(make_request("a", list(range(10)), max_tokens=2))
    engine.submit(make_request("b", list(range(20, 30)), max_tokens=2))
    assert engine.step().passed_over == ("b",)
    while engine.has_work:
        assert engine.step().passed_over == (), "it waits, and that is known"


def test_a_cancelled_hand_off_leaves_reported_blocks_to_their_reader() -> None:
    engine = make_engine(budget=4)
    engine.submit(make_request("r", list(range(10)), hand_off=True))
    (report,) = engine.step().computed
    engine.cancel(ID)
    engine.check_invariants()
    assert engine.stats().num_free_blocks == 63
    engine.release_blocks(report.block_ids)
    assert engine.stats().num_free_blocks == 64
    with pytest.raises(RuntimeError, match="more often"):
        engine.release_blocks(report.block_ids)


def test_a_moved_request_hands_off_its_outputs_too() -> None:
    prompt = list(range(6))
    outputs = expected(prompt, 3)
    request = make_request("r", prompt, hand_off=True, output_token_ids=list(outputs))
    (report,) = reports_of(make_engine(), request)
    assert (report.num_tokens, report.is_last) == ((4, 4, 1), True)


def test_a_prefill_node_waits_rather_than_preempt() -> None:
    engine = make_engine(num_blocks=5, budget=4)
    requests = [make_request(f"r{i}", [i] * 12, hand_off=True) for i in range(3)]
    for request in requests:
        engine.submit(request)
    held: list[BlockId] = []
    for _ in range(100):
        if not engine.has_work:
            engine.release_blocks(held)
            held = []
        held += [block for report in engine.step().computed for block in report.block_ids]
        assert engine.stats().num_running <= 1
    assert not engine.scheduler.requests
    assert engine.stats().num_preemptions == 0
    assert engine.stats().num_prompt_tokens_computed == 36


def test_blocks_travel_between_two_engines() -> None:
    """The whole path in small: prefill here, bytes of blocks across, decode there."""
    prompt = list(range(22))
    prefill, decode = make_engine(budget=8), make_engine(num_blocks=9)
    request = awaiting(prompt)
    begin_loading(decode, request)
    memories = [FakeBlockMemory(runner_of(engine).kv) for engine in (prefill, decode)]
    results = run(prefill, make_request("p", prompt, hand_off=True, sampling=request.sampling))
    for report in (report for result in results for report in result.computed):
        for i, block in enumerate(report.block_ids, report.first_index):
            memories[1].write(request.block_table[i], memories[0].read(block))
            decode.block_loaded(ID, i)
    decode.loading_done(ID)
    first, _ = outputs_of(results, "p")
    decode.continue_with(ID, first)
    assert first + outputs_of(run(decode), "r")[0] == expected(prompt)
    assert decode.stats().num_recomputed_tokens == 0
