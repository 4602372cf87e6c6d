"""Which way a preempted request gets back what it loses, and who that is: a pure function of what was measured."""

import pytest

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.engine.preemption import Choice, Loss, Rates, Way, choose_victim, choose_way
from kvasir.engine.speeds import PrefillMeter, StepTimes
from kvasir.engine.stats import StepMetrics

BLOCK_SIZE = 16


def loss(num_tokens: int, kept: int = 0, stored: int = 0) -> Loss:
    num_own = -(-(num_tokens - kept) // BLOCK_SIZE)
    return Loss(
        num_tokens=num_tokens,
        num_kept_tokens=kept,
        num_stored_tokens=stored,
        num_own_blocks=num_own,
        num_freed_blocks=num_own,
        block_size=BLOCK_SIZE,
    )


def rates(token_s: float, copy_s: float | None, fetch_s: float | None = None, position_s: float = 0.0) -> Rates:
    return Rates(prefill=PrefillSpeed(token_s, position_s), copy_s_per_block=copy_s, fetch_s_per_block=fetch_s)


def test_copies_go_both_ways() -> None:
    """160 tokens, 10 blocks: computed in 0.16 s, copied in 2 x 10 x 0.007 or 0.009 s."""
    assert choose_way(loss(160), rates(0.001, 0.007), 10) == Choice(Way.SWAP, pytest.approx(0.14))
    assert choose_way(loss(160), rates(0.001, 0.009), 10) == Choice(Way.RECOMPUTE, pytest.approx(0.16))


def test_the_longer_the_context_the_better_a_copy() -> None:
    """A token at position 1000 costs twice what the first one does, and its copy as much."""
    slow = rates(0.001, 0.010, position_s=0.000001)
    assert choose_way(loss(320), slow, 100).way is Way.RECOMPUTE
    assert choose_way(loss(1600), slow, 100).way is Way.SWAP


def test_room_on_the_host_decides_first() -> None:
    assert choose_way(loss(160), rates(1.0, 0.0), 9).way is Way.RECOMPUTE
    assert choose_way(loss(160), rates(1.0, 0.0), 10).way is Way.SWAP


def test_what_others_hold_costs_nothing() -> None:
    """150 of 160 tokens will be found again; their copies would be for nothing too."""
    assert choose_way(loss(160, kept=144), rates(0.001, 0.007), 10) == Choice(Way.SWAP, pytest.approx(0.014))
    assert choose_way(loss(160, kept=160), rates(0.001, 0.007), 10) == Choice(Way.RECOMPUTE, 0.0)


def test_fetching_again_costs_the_stored_part_and_computing_what_lies_behind_it() -> None:
    ways = rates(0.001, None, fetch_s=0.002)
    assert choose_way(loss(160, stored=128), ways, 0) == Choice(Way.FETCH, pytest.approx(8 * 0.002 + 0.032))
    assert choose_way(loss(160, kept=128, stored=128), ways, 0).way is Way.RECOMPUTE, "nothing is left to be fetched"
    assert choose_way(loss(160, stored=128), rates(0.001, None, fetch_s=0.02), 0).way is Way.RECOMPUTE


def test_what_was_never_measured_is_tried() -> None:
    assert choose_way(loss(160), rates(0.001, None), 10) == Choice(Way.SWAP, 0.0)
    assert choose_way(loss(160, stored=160), rates(0.001, 1.0), 10) == Choice(Way.FETCH, 0.0)
    never = Rates(copy_s_per_block=1.0)
    assert choose_way(loss(160), never, 10).way is Way.SWAP, "it has never computed a prompt"
    assert choose_way(loss(160), never, 0).way is Way.RECOMPUTE, "there is no other way"


def test_the_last_come_gives_way_unless_another_is_much_cheaper() -> None:
    assert choose_victim([1.0, 1.0, 1.0], [4, 4, 4]) == 2
    assert choose_victim([0.6, 1.0, 1.0], [4, 4, 4]) == 2, "not by enough"
    assert choose_victim([0.3, 0.4, 1.0], [4, 4, 4]) == 0
    assert choose_victim([0.3, 0.4, 1.0], [1, 4, 4]) == 1, "what counts is the price of a block"
    assert choose_victim([0.0, 1.0], [0, 4]) == 1, "one that frees none is no help"
    assert choose_victim([1.0], [0]) == 0


def test_a_meter_finds_what_a_token_and_what_its_position_costs() -> None:
    meter = PrefillMeter()
    assert meter.speed is None
    for start in (0, 512, 1024, 1536) * 3:
        num_tokens = 512
        positions = sum(range(start, start + num_tokens))
        meter.note(num_tokens, positions, num_tokens * 0.001 + positions * 2e-6)
    speed = meter.speed
    assert speed is not None
    assert speed.token_s == pytest.approx(0.001)
    assert speed.position_s == pytest.approx(2e-6)
    assert speed.seconds(0, 100) == pytest.approx(100 * 0.001 + sum(range(100)) * 2e-6)
    assert speed.seconds(1000, 1001) == pytest.approx(0.003)


def test_short_steps_hardly_hide_what_long_ones_have_shown() -> None:
    """A step takes 20 ms however few its tokens are. The turns of conversations, most of which is cached, are short."""
    meter = PrefillMeter()
    for num_tokens in (2000,) * 5 + (32,) * 60:
        meter.note(num_tokens, sum(range(num_tokens)), 0.020 + num_tokens * 0.001)
    speed = meter.speed
    assert speed is not None
    assert speed.seconds(0, 2000) == pytest.approx(2.0, rel=0.05)


def test_a_meter_of_few_or_odd_steps_stays_sane() -> None:
    meter = PrefillMeter()
    meter.note(0, 0, 1.0)
    meter.note(10, 45, -1.0)
    assert meter.speed is None
    meter.note(10, 45, 0.02)
    assert meter.speed == PrefillSpeed(pytest.approx(0.002), 0.0)
    meter.note(10, 10_000, 0.001)  # cheaper further back: noise
    speed = meter.speed
    assert speed is not None
    assert speed.position_s == 0
    steep = PrefillMeter()
    steep.note(10, 0, 0.00001)
    steep.note(10, 10_000, 1.0)
    speed = steep.speed
    assert speed is not None
    assert min(speed.token_s, speed.position_s) >= 0


def test_a_step_that_takes_no_longer_than_a_decoding_one_says_nothing_of_prefill() -> None:
    """Ten tokens beside a decoding step of 20 ms: the weights are read in any case, and that is all it takes."""
    times = StepTimes()
    times.note(step_of(0.020, num_decode_tokens=4))
    times.note(step_of(0.025, num_prefill_tokens=10, num_decode_tokens=4))
    times.note(step_of(0.025, num_prefill_tokens=10))
    assert times.prefill_speed is None
    times.note(step_of(0.120, num_prefill_tokens=100, num_decode_tokens=4))
    assert times.prefill_speed == PrefillSpeed(pytest.approx(0.001), 0.0)


def step_of(step_time_s: float, num_prefill_tokens: int = 0, num_decode_tokens: int = 0) -> StepMetrics:
    return StepMetrics(
        step=1,
        step_time_s=step_time_s,
        num_seqs=1,
        num_prefill_tokens=num_prefill_tokens,
        num_decode_tokens=num_decode_tokens,
        queue_s=(),
    )
