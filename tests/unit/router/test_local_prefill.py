"""When a decode node prefills for itself."""

from kvasir.router.costs import LocalPrefill
from kvasir.router.policy import (
    Rules,
    choose,
    prefix_aware,
)
from tests.unit.router.made_up import RULES, chosen, need, node


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
