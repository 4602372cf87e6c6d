"""What is measured of a source, and when computing beats it: no clock but a number."""

import pytest

from kvasir.kv_connector.costs import CostRule, Rate, RateMeter, Rates

BLOCK = 1000
MEGA = 10**6


class World:
    def __init__(self, forget_after_s: float = 30.0) -> None:
        self.now_s = 0.0
        self.meter = RateMeter(BLOCK, forget_after_s, lambda: self.now_s)


def test_a_few_blocks_say_nothing_of_a_bandwidth_unless_they_took_long() -> None:
    world = World()
    world.meter.note(2 * BLOCK, 0.001)
    assert world.meter.rate is None
    world.meter.note(2 * BLOCK, 1.0)
    assert world.meter.bandwidth_bytes_per_s == pytest.approx(0.7 * 2 * BLOCK + 2 * BLOCK, rel=0.01)


def test_what_is_newer_counts_more() -> None:
    world = World()
    for _ in range(20):
        world.meter.note(100 * BLOCK, 1.0)
    for _ in range(4):
        world.meter.note(10 * BLOCK, 1.0)
    rate = world.meter.bandwidth_bytes_per_s
    assert rate is not None
    assert 10 * BLOCK < rate < 40 * BLOCK


def test_a_dead_source_is_one_of_next_to_no_bandwidth() -> None:
    world = World()
    world.meter.note(0, 5.0)
    rate = world.meter.rate
    assert rate is not None
    assert rate.fetch_s(BLOCK) > 1000


def test_an_old_measurement_sends_one_ahead_and_is_replaced_by_what_he_finds() -> None:
    world = World(forget_after_s=30)
    world.meter.note(10 * BLOCK, 10.0)
    world.now_s = 29
    assert world.meter.ask() is not None
    world.now_s = 31
    assert world.meter.ask() is None, "one finds out"
    assert world.meter.ask() is not None, "the others go by what was known"
    world.meter.note(1000 * BLOCK, 1.0)
    assert world.meter.bandwidth_bytes_per_s == 1000 * BLOCK, "the slow past is forgotten"


def test_one_who_only_wants_to_know_leaves_it_to_others_to_find_out() -> None:
    world = World(forget_after_s=30)
    world.meter.note(10 * BLOCK, 10.0)
    world.now_s = 31
    assert world.meter.current is None
    assert world.meter.current is None, "he was not the one"
    assert world.meter.ask() is None
    assert world.meter.current is not None, "somebody is at it"


def test_an_old_latency_is_replaced_with_the_rest() -> None:
    """It used to fade by a third every ten seconds: one hiccup at the start was held against a source for minutes."""
    world = World(forget_after_s=30)
    world.meter.note_latency(3.0)
    world.meter.note(100 * BLOCK, 1.0)
    world.now_s = 31
    assert world.meter.ask() is None
    world.meter.note_latency(0.01)
    world.meter.note(100 * BLOCK, 1.0)
    assert world.meter.ask() == Rate(100 * BLOCK, 0.01)


def test_latency_is_paid_once_bandwidth_for_every_byte() -> None:
    world = World()
    world.meter.note_latency(0.5)
    world.meter.note(100 * BLOCK, 1.0)
    rate = world.meter.rate
    assert rate is not None
    assert rate.fetch_s(200 * BLOCK) == pytest.approx(2.5)


def test_sources_are_told_apart_and_the_oldest_forgotten() -> None:
    rates = Rates(BLOCK, 30, lambda: 0.0)
    rates.of("slow").note(10 * BLOCK, 10.0)
    assert rates.of("other").rate is None
    assert set(rates.known()) == {"slow"}
    for number in range(300):
        rates.of(f"peer-{number}")
    assert rates.of("slow").rate is None


@pytest.mark.parametrize(
    ("fetch_s", "compute_s", "is_worth"),
    [
        (0.5, 1.0, True),
        (1.5, 1.0, False),
        (0.09, 0.001, True),  # too little to think about
        (1e9, None, True),  # nobody knows what computing would take
    ],
)
def test_fetching_is_worth_it_where_computing_takes_longer(
    fetch_s: float, compute_s: float | None, is_worth: bool
) -> None:
    assert CostRule().is_worth_fetching(fetch_s, compute_s) is is_worth


def test_waiting_ends_when_it_has_cost_what_computing_costs() -> None:
    rule = CostRule(patience_s=1.0)
    assert rule.give_up_after_s(5.0) == 5.0
    assert rule.give_up_after_s(0.01) == 1.0, "a hiccup is no verdict"
    assert rule.give_up_after_s(None) == float("inf")
