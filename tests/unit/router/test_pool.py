"""What the router thinks a node has room for, between two of its reports."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvasir.common.errors import NodeUnavailable
from kvasir.router.nodes import NodeInfo, NodeLoad, Role, pairing_refusal
from kvasir.router.pool import Node, NodePool, Reservation
from kvasir.router.session import NodeSession
from kvasir.router.views import Need

NO_SESSION = cast(NodeSession, None)  # nothing here talks to a node


def info(address: str = "a:1", role: Role = Role.DECODE, **changes: Any) -> NodeInfo:
    fields: dict[str, Any] = {
        "epoch": "e",
        "model_name": "m",
        "kv_identity": b"\x01",
        "block_size": 16,
        "num_kv_heads": 2,
        "vocab_size": 100,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_total_blocks": 100,
        "connector": "tcp",
        "kv_endpoint": "a:2",
        "metrics_address": "",
        "eos_token_ids": frozenset({1}),
    }
    return NodeInfo(address=address, role=role, **(fields | changes))


def load(
    num_free_blocks: int = 100, num_running: int = 0, num_waiting: int = 0, num_queued_tokens: int = 0
) -> NodeLoad:
    return NodeLoad(
        num_running=num_running,
        num_waiting=num_waiting,
        num_free_blocks=num_free_blocks,
        num_queued_tokens=num_queued_tokens,
    )


def node(changed: Callable[[], None] = lambda: None) -> Node:
    return Node(info(), NO_SESSION, load(), changed)


def test_a_reservation_counts_at_once_and_until_it_is_released() -> None:
    one = node()
    reservation = Reservation(one, num_tokens=33, num_queued_tokens=32)
    view = one.view()
    assert (view.num_free_blocks, view.num_seats_taken, view.num_queued_tokens) == (97, 1, 32)
    reservation.queued_at_most(10)
    view = one.view()
    assert (view.num_free_blocks, view.num_queued_tokens) == (97, 10)
    reservation.queued_at_most(20)  # late news
    assert one.view().num_queued_tokens == 10
    reservation.holds(49)
    view = one.view()
    assert (view.num_free_blocks, view.num_queued_tokens) == (96, 0)
    reservation.release()
    reservation.release()
    reservation.queued_at_most(0)
    reservation.holds(1000)
    view = one.view()
    assert (view.num_free_blocks, view.num_seats_taken, view.num_queued_tokens) == (100, 0, 0)


def test_a_report_that_was_made_before_the_request_arrived_does_not_hide_it() -> None:
    one = node()
    Reservation(one, 33, 0)
    one.report(load(num_free_blocks=100), is_draining=False)
    assert one.view().num_free_blocks == 97


def test_what_a_waiting_request_will_find_cached_is_not_taken_for_the_work_of_others() -> None:
    one = node()
    reservation = Reservation(one, num_tokens=100, num_queued_tokens=4, num_expected_tokens=96)
    one.report(load(num_queued_tokens=100), is_draining=False)
    assert one.view().num_queued_tokens == 4
    one.report(load(num_queued_tokens=130), is_draining=False)
    assert one.view().num_queued_tokens == 34
    reservation.is_admitted = True
    one.report(load(num_queued_tokens=100), is_draining=False)
    assert one.view().num_queued_tokens == 100, "it was not there after all"


def test_what_a_request_will_find_where_it_is_not_computed_hides_nobodys_work() -> None:
    """A decode node does not count as queued what a prefill node computes."""
    one = node()
    Reservation(one, num_tokens=100, num_queued_tokens=0, num_expected_tokens=96)
    one.report(load(num_queued_tokens=90), is_draining=False)
    assert one.view().num_queued_tokens == 90


def test_a_report_is_the_truth_about_admitted_requests() -> None:
    """Three requests share a prefix: together they hold fewer blocks than each alone added up."""
    one = node()
    reservations = [Reservation(one, 160, 0) for _ in range(3)]
    assert one.view().num_free_blocks == 70
    for reservation in reservations:
        reservation.is_admitted = True
    one.report(load(num_free_blocks=88, num_running=3), is_draining=False)
    assert one.view().num_free_blocks == 88
    Reservation(one, 160, 0)
    assert one.view().num_free_blocks == 78
    reservations[0].release()
    assert one.view().num_free_blocks == 88
    assert one.view().num_seats_taken == 3


def test_requests_of_another_router_count() -> None:
    one = node()
    mine = Reservation(one, 16, 16)
    mine.is_admitted = True
    one.report(load(num_free_blocks=50, num_running=4, num_waiting=2, num_queued_tokens=500), is_draining=False)
    view = one.view()
    assert (view.num_free_blocks, view.num_seats_taken, view.num_queued_tokens) == (50, 6, 500)
    mine.release()
    view = one.view()
    assert (view.num_free_blocks, view.num_seats_taken, view.num_queued_tokens) == (51, 5, 484)


def test_a_no_holds_until_the_next_report_and_draining_for_good() -> None:
    one = node()
    one.refused(is_draining=False)
    assert one.view().is_full
    one.report(load(), is_draining=False)
    assert not one.view().is_full
    one.refused(is_draining=True)
    one.report(load(), is_draining=False)
    assert (one.view().is_full, one.view().is_draining) == (False, True)


def test_whoever_waits_for_room_hears_of_it() -> None:
    calls: list[int] = []
    one = node(lambda: calls.append(1))
    calls.clear()
    reservation = Reservation(one, 16, 16)
    assert calls == []
    reservation.queued_at_most(0)
    reservation.release()
    one.report(load(), is_draining=False)
    assert len(calls) == 3


def test_nodes_of_another_model_or_block_size_are_refused_with_both_values() -> None:
    pool = NodePool()
    pool.add(info("a:1"), NO_SESSION, load())
    assert pool.refusal(info("b:1", Role.PREFILL)) == ""
    other_model = pool.refusal(info("b:1", kv_identity=b"\x02"))
    assert "identity 02" in other_model
    assert "has 01" in other_model
    other_size = pool.refusal(info("b:1", block_size=32, kv_identity=b"\x02"))  # the one is part of the other
    assert "block size 32" in other_size
    assert "has 16" in other_size
    with pytest.raises(NodeUnavailable, match="block size 32"):
        pool.add(info("b:1", block_size=32), NO_SESSION, load())
    assert pairing_refusal(info(), [info("b:1")]) == ""
    assert pool.refusal(info("a:1", kv_identity=b"\x02")) == ""  # the same address, restarted with another model


def test_a_node_that_came_back_is_not_removed_by_the_end_of_its_older_self() -> None:
    pool = NodePool()
    members: list[int] = []
    pool.when_members_change(lambda: members.append(len(pool.nodes())))
    older = pool.add(info(epoch="1"), NO_SESSION, load())
    newer = pool.add(info(epoch="2"), NO_SESSION, load())
    pool.remove(older)
    assert pool.nodes() == [newer]
    pool.remove(newer)
    assert members == [1, 1, 0]


def test_who_else_could_prefill() -> None:
    pool = NodePool()
    lost = pool.add(info("a:1", Role.PREFILL), NO_SESSION, load())
    need = Need(num_tokens=100, max_num_tokens=200)
    assert not pool.can_prefill_elsewhere(need, lost)
    other = pool.add(info("b:1", Role.PREFILL), NO_SESSION, load())
    assert pool.can_prefill_elsewhere(need, lost)
    other.drain()
    assert not pool.can_prefill_elsewhere(need, lost)
