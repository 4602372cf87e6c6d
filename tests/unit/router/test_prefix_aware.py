"""What the default policy does, over made-up clusters that have a name."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.policy import (
    Rules,
    choose,
    least_loaded,
)
from tests.unit.router.made_up import APART, RULES, chosen, need, node


def test_a_prompt_goes_where_it_is_held() -> None:
    prefill, decode = [node("p1"), node("p2")], [node("d1"), node("d2")]
    for last in ("p1", "d1"), ("p2", "d2"):
        assert chosen({"p2": 1200, "d2": 1200}, prefill, decode, last=last) == ("d2", "p2", "")
        assert chosen({"p1": 1200, "d2": 1200}, prefill, decode, last=last) == ("d2", "p1", "")


def test_it_stays_until_what_waits_there_costs_more_than_computing_it_elsewhere() -> None:
    decode = [node("d")]
    for queued, expected in ((0, "p1"), (400, "p1"), (800, "p1"), (1000, "p2"), (1900, "p2")):
        prefill = [node("p1", num_queued_tokens=queued), node("p2")]
        assert chosen({"p1": 1200}, prefill, decode)[1] == expected, queued


def test_a_holder_without_room_loses() -> None:
    held = {"p1": 1584, "d1": 1584}
    full = [
        {"num_queued_tokens": 4096},
        {"num_seats_taken": 8},
        {"is_full": True},
        {"is_draining": True},
    ]
    for changes in full:
        assert chosen(held, [node("p1", **changes), node("p2")], [node("d1")], rules=APART)[1] == "p2"
    for changes in ({"num_seats_taken": 8}, {"num_free_blocks": 100}, {"is_full": True}, {"is_draining": True}):
        assert chosen(held, [node("p1")], [node("d1", **changes), node("d2")])[0] == "d2"


def test_a_faster_node_is_worth_more_than_a_little_prefix() -> None:
    slow, fast = node("p1", prefill_speed=PrefillSpeed(0.004)), node("p2")
    assert chosen({"p1": 400}, [slow, fast], [node("d")])[1] == "p2"
    assert chosen({"p1": 1500}, [slow, fast], [node("d")])[1] == "p1"


def test_what_stands_far_back_costs_more() -> None:
    """The same 800 tokens: those behind 800 others attend to all of them."""
    steep = PrefillSpeed(token_s=0.0001, position_s=0.00001)
    prefill = [node("p1", prefill_speed=steep), node("p2", prefill_speed=steep, num_queued_tokens=4000)]
    assert steep.seconds(800, 1600) > 2 * steep.seconds(0, 800)
    assert chosen({"p2": 800}, prefill, [node("d")])[1] == "p2", "4000 tokens far in front are sooner done"


def test_a_decode_node_that_holds_it_may_have_a_few_requests_more() -> None:
    """60 blocks take 60 ms to come; each request that runs there makes a step of 20 ms one more's."""
    wants, prefill = need(960), [node("p")]
    for num_seats, expected in ((0, "d1"), (2, "d1"), (4, "d2")):
        decode = [node("d1", num_seats_taken=num_seats), node("d2")]
        assert chosen({"d1": 944}, prefill, decode, rules=APART, wants=wants)[0] == expected


def test_where_nobody_else_prefills_the_queue_and_what_is_to_be_computed_count() -> None:
    """1200 of 1600 tokens are held by d1: 0.4 s there, 1.6 s elsewhere."""
    for prefill in ([], [node("p", is_draining=True)], [node("p", connector="redis")]):
        for num_seats, queued, expected in ((6, 0, "d1"), (1, 400, "d1"), (1, 4000, "d2")):
            decode = [node("d1", num_seats_taken=num_seats, num_queued_tokens=queued), node("d2")]
            assert chosen({"d1": 1200}, prefill, decode) == (expected, None, "alone"), (num_seats, queued)


def test_equal_nodes_take_turns() -> None:
    nodes, last, counts = [node(name) for name in "abcde"], "", Counter[str]()
    for _ in range(100):
        last = chosen({}, nodes, [node("d")], last=(last, ""))[1] or ""
        counts[last] += 1
    assert set(counts.values()) == {20}


@pytest.mark.parametrize("seed", range(5))
def test_nodes_that_measure_a_little_differently_take_turns_too(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [node(name, prefill_speed=PrefillSpeed(rng.uniform(0.001, 0.002))) for name in "abcd"]
    last, counts = "", Counter[str]()
    for _ in range(100):
        last = chosen({}, nodes, [node("d")], last=(last, ""))[1] or ""
        counts[last] += 1
    assert set(counts.values()) == {25}


def test_conversations_spread_and_stay() -> None:
    """Each turn goes to a node and is cached there; an idle cluster. None moves, and each node has its share."""
    nodes, last, homes = [node(name) for name in "abc"], "", dict[int, set[str]]()
    held: dict[int, dict[str, int]] = {number: {} for number in range(12)}
    for turn in range(5):
        for number in random.Random(turn).sample(range(12), 12):
            num_tokens = 300 * (turn + 1)
            last = chosen(held[number], nodes, [node("d")], wants=need(num_tokens), last=(last, ""))[1] or ""
            homes.setdefault(number, set()).add(last)
            held[number][last] = num_tokens // 16 * 16
    assert all(len(home) == 1 for home in homes.values())
    assert set(Counter(next(iter(home)) for home in homes.values()).values()) == {4}


def test_a_prompt_that_all_ask_for_spreads_when_its_holder_is_loaded() -> None:
    held, queued = {"a": 1584}, {"a": 0, "b": 0, "c": 0}
    seen = []
    for _ in range(300):
        nodes = [node(name, num_queued_tokens=tokens) for name, tokens in queued.items()]
        choice = choose(need(1600), nodes, [node("d")], APART, lambda address: held.get(address, 0))
        if choice is None:
            break
        assert choice.prefill is not None
        address = choice.prefill.address
        queued[address] += 1600 - held.get(address, 0)
        held[address] = 1584
        seen.append(address)
    assert set(seen[:50]) == {"a"}
    assert set(seen) == {"a", "b", "c"}


def test_before_anything_is_measured_tokens_are_compared() -> None:
    fresh: dict[str, Any] = {"prefill_speed": None, "decode_step_s": 0.0, "block_fetch_s": 0.0}
    decode = [node("d1", **fresh), node("d2", **fresh)]
    for queued, expected in ((0, "p1"), (800, "p1"), (1300, "p2")):
        prefill = [node("p1", num_queued_tokens=queued, **fresh), node("p2", **fresh)]
        assert chosen({"p1": 1200, "d2": 800}, prefill, decode)[:2] == ("d2", expected)


def test_a_node_that_has_measured_nothing_is_taken_for_one_like_the_others() -> None:
    new = node("p2", prefill_speed=None)
    assert chosen({}, [node("p1", num_queued_tokens=1500), new], [node("d")])[1] == "p2"
    assert chosen({}, [node("p1"), replace(new, num_queued_tokens=1500)], [node("d")])[1] == "p1"


def test_the_requests_of_one_that_has_not_decoded_yet_count_as_much_as_elsewhere() -> None:
    decode = [node("d1", num_seats_taken=6, decode_step_s=0.0), node("d2", num_seats_taken=2)]
    assert chosen({}, [node("p")], decode)[0] == "d2"


def test_where_nobody_has_told_anything_it_is_as_least_loaded() -> None:
    """Of prefill nodes, the queue is what a prompt waits for: their pressure, where nothing else is scarcer."""
    fresh: dict[str, Any] = {"prefill_speed": None, "decode_step_s": 0.0, "block_fetch_s": 0.0}
    for seed in range(2000):
        rng = random.Random(seed)
        decode = [
            node(f"d{i}", num_seats_taken=rng.randrange(8), num_free_blocks=rng.randrange(300, 1001), **fresh)
            for i in range(rng.randrange(1, 5))
        ]
        queues = [rng.randrange(4) * 1000 for _ in range(rng.randrange(1, 5))]
        prefill = [node(f"p{i}", num_queued_tokens=queue, **fresh) for i, queue in enumerate(queues)]
        last = rng.choice(["", "p0", "p1"]), rng.choice(["", "d0", "d1"])
        by_load = Rules(least_loaded, RULES.local_prefill)
        expected, ours = (choose(need(), prefill, decode, rules, lambda _: 0, *last) for rules in (by_load, RULES))
        assert ours == expected, seed
