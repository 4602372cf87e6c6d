"""Scripted requests: how often their drafts are right, and what verifying costs, is given; what comes out is time."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvasir.engine.speculation.payoff import Acceptance, Payoff, StepCosts, Track, num_that_pay

MOST = 4


@dataclass
class Scripted:
    rate: Callable[[int], float]  # by how many tokens there are already
    track: Track
    num_tokens: int = 0
    num_drafts: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(5))


@dataclass
class Machine:
    """A step takes `base_s`, and so much more for each request and each draft."""

    base_s: float = 1.0
    seq_s: float = 0.02
    draft_s: float = 0.1

    def step_s(self, num_seqs: int, num_drafts: int) -> float:
        return self.base_s + self.seq_s * num_seqs + self.draft_s * num_drafts


def run(machine: Machine, rates: list[Callable[[int], float]], num_steps: int) -> tuple[list[Scripted], float]:
    """The requests as they are after that many steps, and how much faster they came there than without drafts."""
    payoff = Payoff()
    requests = [Scripted(rate, payoff.new_track(), rng=random.Random(i)) for i, rate in enumerate(rates)]
    total_s = 0.0
    for _ in range(num_steps):
        drafts = [0] * len(requests)
        if not payoff.costs.wants_plain(len(requests)):
            drafts = [payoff.num_drafts(one.track, len(requests), MOST) for one in requests]
        for one, num_drafts in zip(requests, drafts, strict=True):
            num_kept = 0
            while num_kept < num_drafts and one.rng.random() < one.rate(one.num_tokens):
                num_kept += 1
            if num_drafts:
                payoff.note_drafts(one.track, num_drafts, num_kept)
            else:
                payoff.note_without(one.track)
            one.num_tokens += 1 + num_kept
            one.num_drafts += num_drafts
        step_s = machine.step_s(len(requests), sum(drafts))
        payoff.costs.note(len(requests), sum(drafts), step_s)
        total_s += step_s
    plain_s = machine.step_s(len(requests), 0) / len(requests)
    return requests, sum(one.num_tokens for one in requests) * plain_s / total_s


def always(rate: float) -> Callable[[int], float]:
    return lambda num_tokens: rate


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_what_is_never_right_costs_next_to_nothing(rate: float, num_seqs: int) -> None:
    _, speedup = run(Machine(draft_s=0.15), [always(rate)] * num_seqs, 1000)
    assert speedup > 0.97


def test_what_is_always_right_has_all_drafts() -> None:
    (one,), speedup = run(Machine(), [always(1.0)], 500)
    assert speedup > 3.2, "at most 5 / 1.4"
    assert one.num_drafts > 0.9 * MOST * 500


@pytest.mark.parametrize("price", [0.02, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("num_seqs", [1, 4, 16])
def test_it_never_loses_and_wins_where_there_is_something_to_win(price: float, num_seqs: int) -> None:
    plain_s = Machine().step_s(num_seqs, 0)
    machine = Machine(draft_s=price * plain_s / num_seqs)
    for rate in (0.0, 0.3, 0.6, 0.9):
        _, speedup = run(machine, [always(rate)] * num_seqs, 800)
        kept = [sum(rate**i for i in range(1, num + 1)) for num in range(MOST + 1)]
        best = max((1 + kept[num]) * plain_s / machine.step_s(num_seqs, num * num_seqs) for num in range(MOST + 1))
        assert speedup > 0.97
        assert speedup > 1 + 0.6 * (best - 1) - 0.03, (rate, best)


def test_in_a_large_batch_drafts_are_dearer() -> None:
    """Where a step's time goes with its tokens, an accepted draft saves no more than it costs."""
    machine = Machine(base_s=0.1, seq_s=1.0, draft_s=1.0)
    requests, speedup = run(machine, [always(0.7)] * 16, 600)
    assert speedup > 0.97
    assert sum(one.num_drafts for one in requests) < 0.05 * 16 * 600
    assert run(Machine(base_s=40, seq_s=1.0, draft_s=1.0), [always(0.7)] * 16, 600)[1] > 1.2


def test_each_request_by_itself() -> None:
    (good, bad), _ = run(Machine(draft_s=0.2), [always(0.95), always(0.02)], 600)
    assert good.num_drafts > 3 * 500
    assert bad.num_drafts < 60


def test_it_is_tried_again() -> None:
    """A text that begins to repeat itself after 600 tokens."""
    (one,), speedup = run(Machine(), [lambda num_tokens: 0.0 if num_tokens < 600 else 0.98], 1500)
    assert one.num_tokens > 600 + 4 * 800
    (other,), _ = run(Machine(), [lambda num_tokens: 0.98 if num_tokens < 600 else 0.0], 1500)
    assert other.num_tokens == pytest.approx(600 + 1500 - 600 / 4.5, rel=0.05)
    assert speedup > 1.5


def test_requests_that_come_later_know_what_became_of_others() -> None:
    payoff = Payoff()
    first = payoff.new_track()
    assert payoff.num_drafts(first, 1, MOST) == MOST
    for _ in range(20):
        payoff.note_drafts(first, 1, 0)
    assert payoff.num_drafts(payoff.new_track(), 1, MOST) == 0


def test_a_busy_moment_is_no_price() -> None:
    costs = StepCosts()
    for step_s in (1.0, 1.0, 50.0, 1.0):
        costs.note(2, 0, step_s)
    for step_s in (1.4, 90.0, 1.4, 1.4):
        costs.note(2, 4, step_s)
    assert costs.price(2) == pytest.approx(0.1 / 0.5)
    assert costs.price(3) == costs.price(2), "the nearest that is known"


def test_it_wants_to_know_what_a_step_without_drafts_takes() -> None:
    costs = StepCosts()
    for _ in range(3):
        assert costs.wants_plain(2)
        costs.note(2, 0, 1.0)
    for _ in range(64):
        assert not costs.wants_plain(2)
        costs.note(2, 3, 1.2)
    assert costs.wants_plain(2)
    assert costs.wants_plain(5), "with so many requests it has not been seen"


def test_how_many_pay() -> None:
    assert num_that_pay(0.8, 0.5, 4) == 3
    assert num_that_pay(0.8, 0.9, 4) == 0
    assert num_that_pay(1.0, 0.9, 4) == 4
    assert num_that_pay(1.0, 1.0, 4) == 0
    assert num_that_pay(0.9, 0.1, -1) == 0


def test_what_comes_behind_a_wrong_draft_says_nothing() -> None:
    one, other = Acceptance(), Acceptance()
    one.note(4, 1)
    other.note(2, 1)
    assert one.rate(0.0) == other.rate(0.0)
    assert 0.1 < one.rate(0.0) < one.rate(0.5) < 0.6
