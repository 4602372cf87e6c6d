"""Blocks that a decode node fills itself are reported as they fill, for whoever keeps them."""

import pytest

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import ComputedBlocks
from tests.unit.engine.test_engine import make_engine, make_request, run
from tests.unit.engine.test_loading import ID, awaiting, begin_loading, expected, land

BLOCK_SIZE = 4


def filled_by(engine: Engine) -> list[ComputedBlocks]:
    return [computed for result in run(engine) for computed in result.computed]


def indices_of(reports: list[ComputedBlocks]) -> list[int]:
    return [report.first_index + i for report in reports for i in range(len(report.block_ids))]


def release_all(engine: Engine, reports: list[ComputedBlocks]) -> None:
    engine.check_invariants()
    for report in reports:
        engine.release_blocks(report.block_ids)
    engine.check_invariants()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_and_answer_are_reported_once_under_their_hashes(caching: bool) -> None:
    engine, request = make_engine(caching=caching), make_request("r", list(range(6)), reports_filled=True)
    engine.submit(request)
    reports = filled_by(engine)
    num_computed = request.num_tokens - 1  # the last token is sampled, never computed
    assert num_computed == 6 + 7
    assert indices_of(reports) == [0, 1, 2]
    hashes = block_hashes(root_hash(b"fake-model"), request.token_ids[:num_computed], BLOCK_SIZE)
    assert [one for report in reports for one in report.hashes] == hashes
    assert {count for report in reports for count in report.num_tokens} == {BLOCK_SIZE}
    assert not any(report.is_last for report in reports)
    release_all(engine, reports)


def test_what_was_cached_is_not_reported() -> None:
    engine = make_engine()
    engine.submit(make_request("first", list(range(9))))
    run(engine)
    engine.submit(make_request("r", list(range(9)), reports_filled=True))
    reports = filled_by(engine)
    assert indices_of(reports) == [2, 3], "two blocks of the prompt were in the cache"
    release_all(engine, reports)


def test_what_is_not_exact_has_no_name_nor_what_follows_it() -> None:
    engine, request = make_engine(), awaiting(list(range(6)), reports_filled=True)
    missing = begin_loading(engine, request)
    land(engine, request, *missing)
    engine.block_loaded(ID, 1, is_exact=False)
    engine.loading_done(ID)
    engine.continue_with(ID, expected(list(range(6)))[:1])
    reports = filled_by(engine)
    hashes = [one for report in reports for one in report.hashes]
    assert indices_of(reports) == [0, 1, 2]
    assert hashes[0] is not None
    assert hashes[1:] == [None, None]
    release_all(engine, reports)


def test_a_preempted_request_reports_no_block_twice() -> None:
    engine = make_engine(num_blocks=7)
    requests: list[Request] = [make_request(name, [i] * 6, reports_filled=True) for i, name in enumerate("ab")]
    for request in requests:
        engine.submit(request)
    held: dict[tuple[RequestId, int], BlockId] = {}
    while engine.has_work:
        for computed in engine.step().computed:
            for index, block in enumerate(computed.block_ids, computed.first_index):
                assert (computed.request_id, index) not in held
                held[computed.request_id, index] = block
            engine.release_blocks(computed.block_ids)
    assert engine.stats().num_preemptions > 0
    engine.check_invariants()
