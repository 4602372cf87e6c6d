"""Rounds of a comparison: who comes when, and what of it counts."""

from functools import partial

import pytest

from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.rounds import in_turns, median_ratio, seconds


def test_all_take_their_turn_and_the_first_round_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def work(name: str) -> int:
        order.append(name)
        return len(order)

    quiet = Quiet()
    found = in_turns({name: partial(work, name) for name in "abc"}, 2, quiet, lambda name, at: f"{name} was {at}")
    assert order == [*"abc", *"bca", *"cab"], "nobody always comes after the same one"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert len(quiet.shares) == 3
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[-1]) == ("round 0  a was 1", "round 2  b was 9")


def test_ratios_are_taken_round_by_round() -> None:
    assert median_ratio([1.0, 2.0, 9.0], [2.0, 1.0, 3.0]) == 2.0


def test_work_takes_time() -> None:
    assert seconds(lambda: sum(range(1000))) > 0
