"""The compiled loop against the reference: the best of each row, and what a number in [0, 1) points at."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.kernels.choose import Draw, choose, choose_reference

LAST = math.nextafter(1, 0)


def drawn(logits: Tensor, *draws: Draw, may_hold_bans: bool = False) -> list[int]:
    return choose(logits, draws, may_hold_bans=may_hold_bans)[1].tolist()


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 64, 65, 1000, 1025])
def test_as_the_reference(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(40, vocabulary, generator=generator)
    us = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    draws = [Draw(temperature, u) for temperature, u in zip([0.0, 0.3, 1.0, 1.7] * 10, us, strict=True)]
    for mine, theirs in zip(choose(logits, draws), choose_reference(logits, draws), strict=True):
        assert mine.tolist() == theirs.tolist()


TOP_K = (0, 1, 2, 40, 10**6)
TOP_P = (1.0, 1e-9, 0.313, 0.953, 0.999)
MIN_P = (0.0, 1e-9, 0.05, 1.0)


@pytest.mark.parametrize("vocabulary", [1, 40, 65, 1025, 5000])
@pytest.mark.parametrize("kind", ["spread", "flat", "ties", "bans"])
def test_what_is_left_out_is_what_the_reference_leaves_out(vocabulary: int, kind: str) -> None:
    """Each combination, at temperatures from next to none to more than any wants, with numbers all over [0, 1)."""
    generator = torch.Generator().manual_seed(vocabulary)
    settings = list(itertools.product((1e-30, 0.1, 0.8, 5.0, 50.0), TOP_K, TOP_P, MIN_P))
    us = torch.rand(len(settings), generator=generator, dtype=torch.float64)
    us[::7] = 1e-12
    us[1::7] = LAST
    draws = [Draw(t, u, k, p, least) for (t, k, p, least), u in zip(settings, us.tolist(), strict=True)]
    logits = (0.3 if kind == "flat" else 4) * torch.randn(len(draws), vocabulary, generator=generator)
    if kind == "ties":
        logits = (logits / 2).round()
    if kind == "bans":
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -math.inf
        logits[:, vocabulary // 2] = 1
    mine = choose(logits, draws, may_hold_bans=kind == "bans")
    theirs = choose_reference(logits, draws, may_hold_bans=kind == "bans")
    assert mine[0].tolist() == theirs[0].tolist()
    wrong = [(draws[r], mine[1][r], theirs[1][r]) for r in range(len(draws)) if mine[1][r] != theirs[1][r]]
    assert not wrong


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.9}])
def test_those_that_tie_at_the_edge_all_stay(options: dict[str, float]) -> None:
    logits = torch.full((1, 200), -5.0)
    logits[0, [10, 70, 71, 130, 199]] = torch.tensor([3.0, 4.0, 3.0, 3.0, 3.0])
    left = {drawn(logits, Draw(1.0, i / 400, **options))[0] for i in range(400)}  # type: ignore[arg-type]
    assert left == {10, 70, 71, 130, 199}


def test_only_one_may_come() -> None:
    logits = torch.full((1, 200), -math.inf)
    logits[0, 77] = -2.0
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 500, "top_p": 0.999, "min_p": 1e-9}):
        for u in (0.0, 0.5, LAST):
            assert drawn(logits, Draw(0.8, u, **options), may_hold_bans=True) == [77]  # type: ignore[arg-type]
    assert drawn(logits, Draw(), may_hold_bans=True) == [77]


def test_nothing_may_come_and_yet_there_is_an_end() -> None:
    logits = torch.full((1, 70), -math.inf)
    for draw in (Draw(), Draw(1.0, 0.5), Draw(1.0, 0.5, 3, 0.5, 0.5)):
        assert drawn(logits, draw, may_hold_bans=True) == [0]


def test_of_equals_the_first_is_the_best() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [33, 70]] = 2
    assert drawn(logits, Draw(0.0, 0.9)) == [33]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 63, 99])
def test_a_row_that_is_not_finite_has_no_token(bad: float, at: int) -> None:
    logits = torch.zeros(3, 100)
    logits[1, at] = bad
    for options, first in (({}, 49), ({"top_k": 99}, 49), ({"top_p": 0.5}, 49), ({"min_p": 0.5}, 49)):
        draw = Draw(1.0, 0.495, **options)  # type: ignore[arg-type]
        best, tokens = choose(logits, [draw, draw, Draw(0.0, 0.495)])
        assert best.tolist() == [0, -1, 0]
        assert tokens.tolist() == [first, -1, 0]


def test_the_ends_of_a_distribution() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).repeat(4, 1)
    us = [0.0, 0.25 + 1e-6, 0.75 - 1e-6, LAST]
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": LAST}):  # nothing is left out
        assert drawn(logits[:, :3], *[Draw(1.0, u, **options) for u in us]) == [0, 1, 1, 2]  # type: ignore[arg-type]


def test_what_has_no_weight_is_never_drawn() -> None:
    """Not even by 0, at whose right the first token begins that may come."""
    logits = torch.tensor([[-200.0, 1.0, 2.0, -200.0, -200.0]])
    for options in ({}, {"top_k": 4}, {"top_p": LAST}, {"min_p": 1e-300}):
        assert drawn(logits, Draw(0.1, 0.0, **options)) == [1]  # type: ignore[arg-type]
        assert drawn(logits, Draw(0.1, LAST, **options)) == [2]  # type: ignore[arg-type]


def test_temperatures_that_are_next_to_none() -> None:
    logits = torch.tensor([[1.0, 1.5, -3.0]])
    for temperature in (1e-3, 1e-30, 1e-45):
        assert drawn(logits, Draw(temperature, 0.999)) == [1]


def test_other_rows_make_no_difference() -> None:
    logits = 3 * torch.randn(9, 777, generator=torch.Generator().manual_seed(1))
    draws = [
        Draw(1.0, u, k, p)
        for u, k, p in zip(np.linspace(0.05, 0.95, 9).tolist(), (0, 0, 5) * 3, (1, 0.9, 0.9) * 3, strict=True)
    ]
    together = drawn(logits, *draws)
    assert together == [drawn(logits[i : i + 1], draws[i])[0] for i in range(9)]
    views = torch.cat((logits, logits), dim=1)[:, :777]
    assert drawn(views, *draws) == together, "rows that do not lie side by side"
