import math

import numpy as np
import pytest
import torch

from kvasir.kernels.choose import choose, choose_reference


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 64, 65, 1000, 1025])
def test_as_the_reference(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(40, vocabulary, generator=generator)
    temperatures = [0.0, 0.3, 1.0, 1.7] * 10
    us = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    for mine, theirs in zip(choose(logits, temperatures, us), choose_reference(logits, temperatures, us), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_of_equals_the_first_is_the_best() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [33, 70]] = 2
    assert choose(logits, [0.0], [0.9])[1].tolist() == [33]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 63, 99])
def test_a_row_that_is_not_finite_has_no_token(bad: float, at: int) -> None:
    logits = torch.zeros(3, 100)
    logits[1, at] = bad
    best, drawn = choose(logits, [1.0, 1.0, 0.0], [0.495] * 3)
    assert best.tolist() == [0, -1, 0]
    assert drawn.tolist() == [49, -1, 0]


def test_the_ends_of_a_distribution() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]])).repeat(4, 1)
    us = [0.0, 0.25 + 1e-6, 0.75 - 1e-6, math.nextafter(1, 0)]
    assert choose(logits, [1.0] * 4, us)[1].tolist() == [0, 1, 1, 2]


def test_temperatures_that_are_next_to_none() -> None:
    logits = torch.tensor([[1.0, 1.5, -3.0]])
    for temperature in (1e-3, 1e-30, 1e-45):
        assert choose(logits, [temperature], [0.999])[1].tolist() == [1]


def test_other_rows_make_no_difference() -> None:
    logits = 3 * torch.randn(9, 777, generator=torch.Generator().manual_seed(1))
    us = np.linspace(0.05, 0.95, 9).tolist()
    together = choose(logits, [1.0] * 9, us)[1].tolist()
    assert together == [int(choose(logits[i : i + 1], [1.0], us[i : i + 1])[1][0]) for i in range(9)]
    views = torch.cat((logits, logits), dim=1)[:, :777]
    assert choose(views, [1.0] * 9, us)[1].tolist() == together, "rows that do not lie side by side"
