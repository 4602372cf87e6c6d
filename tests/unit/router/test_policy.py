from dataclasses import replace

import pytest

from kvasir.router.costs import LocalPrefill
from kvasir.router.policy import (
    POLICIES,
    Choice,
    Rules,
    can_ever_decode,
    choose,
    has_room_to_prefill,
    least_loaded,
    round_robin,
)
from kvasir.router.views import Need, NodeView

IDLE = NodeView(
    address="a",
    connector="tcp",
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    num_total_blocks=100,
    max_tokens_held=1600,
    num_free_blocks=100,
    num_seats_taken=0,
    num_queued_tokens=0,
)
NEED = Need(num_tokens=100, max_num_tokens=200)
BY_LOAD = Rules(least_loaded, LocalPrefill(max_uncached_tokens=0))


def at(address: str, **changes: object) -> NodeView:
    return replace(IDLE, address=address, **changes)  # type: ignore[arg-type]


def chosen(choice: Choice | None) -> tuple[str, str | None] | None:
    return choice and (choice.decode.address, choice.prefill.address if choice.prefill else None)


def test_round_robin_goes_round() -> None:
    nodes = [at("c"), at("a"), at("b")]
    last, seen = "", []
    for _ in range(5):
        last = round_robin(nodes, last).address
        seen.append(last)
    assert seen == ["a", "b", "c", "a", "b"]
    assert round_robin([at("a"), at("c")], "b").address == "c"  # the last one has left


def test_least_loaded_looks_at_what_is_scarcest() -> None:
    few_seats, few_blocks, long_queue = (
        at("a", num_seats_taken=3),
        at("b", num_free_blocks=30),
        at("c", num_queued_tokens=512),
    )
    assert [node.pressure for node in (few_seats, few_blocks, long_queue)] == [0.75, 0.7, 0.5]
    assert least_loaded([few_seats, few_blocks, long_queue], "").address == "c"
    assert least_loaded([few_seats, few_blocks], "").address == "b"
    assert least_loaded([at("a"), at("b"), few_seats], "a").address == "b"  # equals take turns


@pytest.mark.parametrize("policy", POLICIES.values())
def test_policies_choose_one_of_what_they_are_given(policy: object) -> None:
    nodes = [at("x", num_seats_taken=1), at("y")]
    assert callable(policy)
    assert all(policy(nodes, last) in nodes for last in ("", "x", "y", "z"))


@pytest.mark.parametrize(
    ("decode", "why"),
    [
        ({"num_seats_taken": 4}, "no seat"),
        ({"num_free_blocks": 6}, "100 tokens and the next one want 7 blocks"),
        ({"max_tokens_held": 199}, "its answer would not fit"),
        ({"is_draining": True}, "draining"),
        ({"is_full": True}, "it said no"),
    ],
)
def test_a_request_waits_for_a_decode_node_with_room(decode: dict[str, object], why: str) -> None:
    assert chosen(choose(NEED, [IDLE], [at("d", **decode)], BY_LOAD)) is None, why
    assert chosen(choose(NEED, [IDLE], [at("d", **decode), at("e")], BY_LOAD)) == ("e", "a")


def test_exactly_enough_room_is_enough() -> None:
    exactly = at("d", num_free_blocks=7, num_seats_taken=3, max_tokens_held=200)
    assert chosen(choose(NEED, [IDLE], [exactly], BY_LOAD)) == ("d", "a")


def test_a_prefill_node_is_given_work_while_under_two_chunks() -> None:
    assert has_room_to_prefill(at("p", num_queued_tokens=1023))
    assert not has_room_to_prefill(at("p", num_queued_tokens=1024))
    assert chosen(choose(NEED, [at("p", num_queued_tokens=1024)], [at("d")], BY_LOAD)) is None


@pytest.mark.parametrize(
    "prefill",
    [[], [at("p", is_draining=True)], [at("p", connector="redis")], [at("p", max_tokens_held=100)]],
    ids=["none", "draining", "speaks another connector", "too small"],
)
def test_without_a_prefill_node_that_could_do_it_the_decode_node_does(prefill: list[NodeView]) -> None:
    assert chosen(choose(NEED, prefill, [at("d")], BY_LOAD)) == ("d", None)


def test_a_request_with_a_ticket_wants_a_decode_node_that_speaks_its_connector() -> None:
    need = Need(num_tokens=100, max_num_tokens=200, wants_prefill=False, connector="redis")
    assert not can_ever_decode(at("d"), need)
    assert chosen(choose(need, [IDLE], [at("d"), at("e", connector="redis")], BY_LOAD)) == ("e", None)


def test_where_the_prefill_nodes_of_one_connector_are_busy_another_connector_has_its_turn() -> None:
    busy, idle = at("p", num_queued_tokens=2000), at("q", connector="redis")
    nodes = [at("d"), at("e", connector="redis", num_seats_taken=2)]
    assert chosen(choose(NEED, [at("p"), idle], nodes, BY_LOAD)) == ("d", "p")
    assert chosen(choose(NEED, [busy, idle], nodes, BY_LOAD)) == ("e", "q")
    assert chosen(choose(NEED, [busy], nodes, BY_LOAD)) == ("e", None), "it prefills for itself in any case"
    assert choose(NEED, [busy, replace(busy, address="q", connector="redis")], nodes, BY_LOAD) is None
