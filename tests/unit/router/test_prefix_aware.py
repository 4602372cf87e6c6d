"""What the default policy does, over made-up clusters: thousands of them, and those that have a name."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.costs import LocalPrefill
from kvasir.router.policy import (
    Choice,
    Rules,
    choose,
    has_room_to_decode,
    has_room_to_prefill,
    least_loaded,
    prefix_aware,
)
from kvasir.router.views import Need, NodeView

RULES = Rules(prefix_aware, LocalPrefill())
APART = Rules(prefix_aware, LocalPrefill(max_uncached_tokens=0))
NODE = NodeView(
    address="",
    connector="tcp",
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    num_total_blocks=1000,
    max_tokens_held=16000,
    num_free_blocks=1000,
    num_seats_taken=0,
    num_queued_tokens=0,
    prefill_speed=PrefillSpeed(token_s=0.001),
    decode_step_s=0.020,
    block_fetch_s=0.001,
)


def node(address: str, **changes: Any) -> NodeView:
    return replace(NODE, address=address, **changes)


def need(num_tokens: int = 1600, **fields: Any) -> Need:
    return Need(num_tokens=num_tokens, max_num_tokens=num_tokens + 100, **fields)


def chosen(
    held: Mapping[str, int],
    prefill: list[NodeView],
    decode: list[NodeView],
    *,
    rules: Rules = RULES,
    wants: Need | None = None,
    last: tuple[str, str] = ("", ""),
) -> tuple[str, str | None, str]:
    choice = choose(wants or need(), prefill, decode, rules, lambda address: held.get(address, 0), *last)
    assert choice is not None
    return choice.decode.address, choice.prefill.address if choice.prefill else None, choice.why_local


# --- where the prompt is ---------------------------------------------------------------------------------------


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


# --- sharing the load ------------------------------------------------------------------------------------------


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


# --- before anything is known ----------------------------------------------------------------------------------


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


# --- whatever comes --------------------------------------------------------------------------------------------


def test_it_never_chooses_a_node_without_room_and_never_waits_while_there_is_some() -> None:
    outcomes = Counter(outcome(random.Random(seed)) for seed in range(5000))
    assert min(outcomes[way] for way in ("waits", "remote", "alone", "cached", "short")) > 50, outcomes


def outcome(rng: random.Random) -> str:
    """Of one made-up case, checked."""
    prefill = [random_node(rng, f"p{i}") for i in range(rng.randrange(4))]
    decode = [random_node(rng, f"d{i}") for i in range(rng.randrange(4))]
    num_tokens = rng.choice([rng.randrange(1, 100), rng.randrange(1, 3000)])
    wants = need(num_tokens, crosses_tiers=rng.random() < 0.1, num_sequences=rng.choice([1, 1, 4]))
    shares = rng.choices([0, 0, num_tokens - 1, rng.randrange(num_tokens)], k=len(prefill) + len(decode))
    held = {one.address: share // 16 * 16 for one, share in zip((*prefill, *decode), shares, strict=True)}
    local = LocalPrefill(rng.choice([0, 64, 10_000]), rng.choice([0, 100]))
    choice = choose(wants, prefill, decode, Rules(prefix_aware, local), held.__getitem__)
    able = [one for one in decode if has_room_to_decode(one, wants)]
    if choice is None:
        waits_for = [one for one in prefill if not one.is_draining and one.connector in {d.connector for d in able}]
        assert not able or waits_for
        assert not able or not all(has_room_to_prefill(one) for one in waits_for)
        return "waits"
    assert choice.decode in able
    check_prefill(choice, wants, prefill, held, local)
    return choice.why_local or "remote"


def check_prefill(
    choice: Choice, wants: Need, prefill: list[NodeView], held: Mapping[str, int], local: LocalPrefill
) -> None:
    decoder = choice.decode
    num_uncached = wants.num_tokens - held[decoder.address]
    if choice.prefill is not None:
        assert choice.prefill in prefill
        assert has_room_to_prefill(choice.prefill)
        assert choice.prefill.connector == decoder.connector
        assert choice.why_local == ""
    elif choice.why_local == "alone":
        assert all(one.is_draining or one.connector != decoder.connector for one in prefill)
    elif choice.why_local == "cached":
        assert num_uncached <= local.max_uncached_tokens
        assert num_uncached <= held[decoder.address]
        assert not wants.crosses_tiers
    else:
        assert choice.why_local == "short"
        assert wants.num_tokens <= local.max_prompt_tokens
        assert not wants.crosses_tiers


def random_node(rng: random.Random, address: str) -> NodeView:
    return node(
        address,
        connector=rng.choice(["tcp", "tcp", "tcp", "redis"]),
        num_free_blocks=rng.choice([0, 10, 100, 1000]),
        num_seats_taken=rng.randrange(9),
        num_queued_tokens=rng.choice([0, 0, 100, 4095, 4096, 9000]),
        is_draining=rng.random() < 0.1,
        is_full=rng.random() < 0.1,
        prefill_speed=rng.choice([None, PrefillSpeed(0.001), PrefillSpeed(0.0001, 0.000001)]),
        decode_step_s=rng.choice([0.0, 0.02]),
        block_fetch_s=rng.choice([0.0, 0.001, 0.1]),
    )


# --- a decode node that prefills for itself --------------------------------------------------------------------


def test_a_decode_node_that_lacks_little_prefills_it_itself() -> None:
    assert chosen({"d": 1584}, [node("p")], [node("d")]) == ("d", None, "cached")
    assert chosen({"d": 1584, "p": 1584}, [node("p")], [node("d")]) == ("d", None, "cached"), "a block's way is longer"
    assert chosen({"d": 1536}, [node("p")], [node("d")]) == ("d", None, "cached"), "64 tokens are few"
    assert chosen({"d": 1520}, [node("p")], [node("d")]) == ("d", "p", ""), "80 are not"


def test_tiers_stay_apart_for_what_is_not_cached() -> None:
    for num_tokens in (1, 15, 16, 17, 33, 64, 65, 1000):
        assert chosen({}, [node("p")], [node("d")], wants=need(num_tokens)) == ("d", "p", "")
    assert chosen({"d": 16}, [node("p")], [node("d")], wants=need(33)) == ("d", "p", ""), "it holds less than half"
    assert chosen({"d": 32}, [node("p")], [node("d")], wants=need(50)) == ("d", None, "cached")


def test_it_does_not_keep_many_waiting_for_what_a_prefill_node_has_time_for() -> None:
    """16 tokens take 16 ms, a step 20 ms at least, a block 1 ms: here a step and 16 ms for each, there 21 and more."""
    for num_seats, queued, expected in ((0, 0, None), (1, 0, "p"), (1, 30, None), (6, 90, "p"), (6, 110, None)):
        prefill, decode = [node("p", num_queued_tokens=queued)], [node("d", num_seats_taken=num_seats)]
        held = {"d": 1584, "p": 1584}
        assert chosen(held, prefill, decode)[1] == expected, (num_seats, queued)


def test_what_is_queued_on_a_decode_node_is_waited_for_once() -> None:
    """By the newcomer, for 100 ms; those that run there wait for its 16 tokens alone: 180 ms in all, there 217."""
    prefill, decode = [node("p", num_queued_tokens=200)], [node("d", num_seats_taken=4, num_queued_tokens=100)]
    assert chosen({"d": 1584, "p": 1584}, prefill, decode) == ("d", None, "cached")


def test_where_all_prefill_nodes_are_full_it_need_not_wait_for_what_it_may_do_itself() -> None:
    full = [node("p", num_queued_tokens=4096)]
    assert chosen({"d": 1584}, full, [node("d", num_seats_taken=7)]) == ("d", None, "cached")
    assert choose(need(), full, [node("d")], RULES, lambda address: 0) is None


def test_short_prompts_where_they_are_asked_to_stay() -> None:
    rules = Rules(prefix_aware, LocalPrefill(max_uncached_tokens=0, max_prompt_tokens=40))
    assert chosen({}, [node("p")], [node("d")], wants=need(40), rules=rules) == ("d", None, "short")
    assert chosen({}, [node("p")], [node("d")], wants=need(41), rules=rules) == ("d", "p", "")
    assert chosen({"d": 1584}, [node("p")], [node("d")], rules=rules) == ("d", "p", "")


def test_what_is_to_cross_the_tiers_crosses_them() -> None:
    rules = Rules(prefix_aware, LocalPrefill(10_000, 10_000))
    wants = need(crosses_tiers=True)
    assert chosen({"d": 1584}, [node("p")], [node("d")], rules=rules, wants=wants) == ("d", "p", "")
    assert chosen({}, [], [node("d")], rules=rules, wants=wants) == ("d", None, "alone")
