"""The compiled building blocks, called from Python."""

import numpy as np

from kvasir.kernels.cpu.prefill_tile import multiply_add
from kvasir.kernels.cpu.simd import exp2, tanh


def test_exp2_is_right_to_a_few_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-126, 0, 2001), -np.logspace(-9, 0, 100)]).astype(np.float32)
    got = np.array([exp2(value) for value in x], dtype=np.float64)
    exact = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(got - exact) / exact) < 3e-7


def test_exp2_at_the_ends() -> None:
    assert exp2(np.float32(0)) == 1
    assert exp2(np.float32(-1)) == 0.5
    assert exp2(np.float32(-np.inf)) == np.float32(2.0**-126)
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


def test_multiply_add() -> None:
    rng = np.random.default_rng(1)
    for rows, depth, columns in ((4, 1, 64), (8, 16, 64), (12, 70, 128)):
        a = rng.standard_normal((rows, depth), dtype=np.float32)
        b = rng.standard_normal((depth, columns), dtype=np.float32)
        c = rng.standard_normal((rows, columns), dtype=np.float32)
        expected = c + a @ b
        multiply_add(a, b, c)
        np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)
