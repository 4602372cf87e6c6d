"""The compiled building blocks, called from Python."""

import numpy as np
import pytest

from kvasir.kernels.cpu.prefill_tile import SCORE_COLUMNS, SCORE_ROWS, TILE_COLUMNS, add_weighted, score
from kvasir.kernels.cpu.simd import TILE_ROWS, exp2, tanh


def test_exp2_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-126, 0, 2001), -np.logspace(-9, 0, 100)]).astype(np.float32)
    got = np.array([exp2(value) for value in x], dtype=np.float64)
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(got - exact) / exact) < 3e-7


def test_exp2_at_the_ends() -> None:
    assert exp2(np.float32(0)) == 1
    assert exp2(np.float32(-1)) == 0.5
    assert exp2(np.float32(-126)) == np.float32(2.0**-126)
    assert exp2(np.float32(-127)) == 0
    assert exp2(np.float32(-np.inf)) == 0
    assert np.isnan(exp2(np.float32(np.nan)))


def test_tanh_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-12, 12, 2001), np.logspace(-9, 0, 100), -np.logspace(-9, 0, 100)])
    x = np.append(x, 0).astype(np.float32)
    got = np.array([tanh(value) for value in x], dtype=np.float64)
    exact = np.tanh(x.astype(np.float64))
    assert np.max(np.abs(got - exact) / np.maximum(np.abs(exact), 1e-30)) < 5e-7
    assert tanh(np.float32(np.inf)) == 1
    assert tanh(np.float32(-np.inf)) == -1
    assert np.isnan(tanh(np.float32(np.nan)))


@pytest.mark.parametrize(("tokens", "group", "begin", "width"), [(4, 1, 0, 32), (5, 4, 90, 128), (16, 3, -7, 64)])
def test_products_of_attention_where_rows_see_them(tokens: int, group: int, begin: int, width: int) -> None:
    """What no row of a register tile sees is not even read: it is NaN here."""
    rng = np.random.default_rng(1)
    rows_of_both = TILE_ROWS * SCORE_ROWS
    num_rows, head_dim = -(-tokens * group // rows_of_both) * rows_of_both, 2 * TILE_COLUMNS
    queries = rng.standard_normal((num_rows, head_dim), dtype=np.float32)
    keys = rng.standard_normal((width // SCORE_COLUMNS, head_dim, SCORE_COLUMNS), dtype=np.float32)
    weights = rng.standard_normal((num_rows, 128), dtype=np.float32)
    values = rng.standard_normal((128, head_dim), dtype=np.float32)
    scores, sums = np.full_like(weights, np.nan), rng.standard_normal((num_rows, head_dim), dtype=np.float32)
    befores, factors = rng.standard_normal((2, num_rows), dtype=np.float32)
    expected_scores, columns = queries @ np.concatenate(list(keys), axis=1), np.arange(128)
    for row in range(0, num_rows, TILE_ROWS):
        weights[row : row + TILE_ROWS, columns > begin + (row + TILE_ROWS - 1) // group] = np.nan
    weights[:, width:] = np.nan
    score(queries, keys, begin, group, width, scores)
    expected_sums = sums * befores[:, None] + np.nan_to_num(weights) @ values * factors[:, None]
    add_weighted(weights, values, begin, group, width, befores, factors, sums)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5, atol=1e-4)
    for row in range(num_rows):
        count = max(0, min(begin + row // group + 1, width))
        np.testing.assert_allclose(scores[row, :count], expected_scores[row, :count], rtol=1e-5, atol=1e-4)
