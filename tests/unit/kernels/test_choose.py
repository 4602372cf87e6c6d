"""The compiled loop against the reference: the best of each row, and what a number in [0, 1) points at."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.kernels.choose import Change, Draw, choose, choose_reference

LAST = math.nextafter(1, 0)


def drawn(logits: Tensor, *draws: Draw, allowed: list[bool] | None = None) -> list[int]:
    changes = {} if allowed is None else {r: Change(allowed=np.array(allowed)) for r in range(len(draws))}
    return choose(logits, draws, changes)[1].tolist()


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
    changes = {}
    if kind == "bans":
        allowed = torch.rand(logits.shape, generator=generator) < 0.3
        allowed[:, vocabulary // 2] = True
        changes = {r: Change(allowed=row) for r, row in enumerate(allowed.numpy())}
    mine = choose(logits, draws, changes)
    theirs = choose_reference(logits, draws, changes)
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
    logits = torch.zeros(1, 200)
    logits[0, 77] = -2.0
    allowed = [token == 77 for token in range(200)]
    for options in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 500, "top_p": 0.999, "min_p": 1e-9}):
        for u in (0.0, 0.5, LAST):
            assert drawn(logits, Draw(0.8, u, **options), allowed=allowed) == [77]  # type: ignore[arg-type]
    assert drawn(logits, Draw(), allowed=allowed) == [77]


def test_nothing_may_come_and_yet_there_is_an_end() -> None:
    for draw in (Draw(), Draw(1.0, 0.5), Draw(1.0, 0.5, 3, 0.5, 0.5)):
        assert drawn(torch.zeros(1, 70), draw, allowed=[False] * 70) == [0]


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


def some_changes(vocabulary: int, generator: torch.Generator) -> list[Change]:
    """Each alone, all together, and on tokens that have several of them."""

    def some_tokens(most: int) -> list[int]:
        return torch.randperm(vocabulary, generator=generator)[:most].tolist()

    bias = [(token, 3.0 - i) for i, token in enumerate(some_tokens(7))]
    seen = {token: i % 3 for i, token in enumerate(some_tokens(30) + [token for token, _ in bias[:2]])}
    allowed = (torch.rand(vocabulary, generator=generator) < 0.5).numpy()
    allowed[0] = True
    return [
        Change(bias=bias),
        Change(repetition=1.7, seen=seen),
        Change(presence=1.5, seen=seen),
        Change(frequency=-0.7, seen=seen),
        Change(allowed=allowed),
        Change(bias, 0.6, -0.3, 0.9, seen, allowed),
    ]


@pytest.mark.parametrize("vocabulary", [1, 65, 1025])
def test_what_is_done_to_rows_first_is_what_the_reference_does(vocabulary: int) -> None:
    """Among rows to which nothing is done, and whatever is drawn then. What was given stays as it was."""
    generator = torch.Generator().manual_seed(vocabulary)
    changes = dict(zip(range(0, 60, 2), 5 * some_changes(vocabulary, generator), strict=True))
    logits = 2 * torch.randn(60, vocabulary, generator=generator)
    before = logits.clone()
    us = torch.rand(60, generator=generator, dtype=torch.float64).tolist()
    kinds = [Draw(), Draw(0.9), Draw(1.2, top_k=20), Draw(0.8, top_p=0.9), Draw(1.0, min_p=0.05)] * 12
    draws = [draw._replace(u=u) for draw, u in zip(kinds, us, strict=True)]
    mine, theirs = choose(logits, draws, changes), choose_reference(logits, draws, changes)
    assert [one.tolist() for one in mine] == [one.tolist() for one in theirs]
    assert torch.equal(logits, before)
    if vocabulary > 1:
        assert mine[0].tolist() != choose(logits, draws)[0].tolist()
    for r in range(60):
        alone = choose(logits[r : r + 1], draws[r : r + 1], {0: changes[r]} if r in changes else {})
        assert (alone[0][0], alone[1][0]) == (mine[0][r], mine[1][r])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_change_hides_that_a_row_is_not_finite(bad: float) -> None:
    logits = torch.zeros(2, 100)
    logits[0, 33] = bad
    change = Change([(33, 1.0)], 2.0, 1.0, 1.0, {33: 2}, np.arange(100) != 33)
    assert choose(logits, [Draw()] * 2, {0: change, 1: change})[0].tolist() == [-1, 0]


def test_penalties_may_leave_nothing_finite() -> None:
    """Repetition below 1 makes of a logit what float32 does not hold: it is the best, as the reference has it."""
    change = Change(repetition=1e-39, seen={7: 0})
    for draw in (Draw(), Draw(1.0, 0.9), Draw(1.0, 0.9, top_p=0.5)):
        tokens = [pick(torch.ones(1, 20), [draw], {0: change})[1][0] for pick in (choose, choose_reference)]
        assert tokens == [7, 7]


def test_weights_are_those_of_the_reference_to_the_last_digits() -> None:
    """A total in float32 once let one token more or less into top-p, where its edge fell between two of these."""
    logits = torch.linspace(0, -12, 49_152)[None]
    ordered = logits[0].double().exp()
    for count in (100, 1000, 10_000, 40_000):
        edge = float(ordered[:count].sum() / ordered.sum())
        for p, last in ((edge * (1 - 1e-12), count - 1), (edge * (1 + 1e-12), count)):
            assert drawn(logits, Draw(1.0, LAST, top_p=p)) == [last]
        for u, token in ((edge * (1 - 1e-12), count - 1), (edge * (1 + 1e-12), count)):
            assert drawn(logits, Draw(1.0, u)) == [token]


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
