import random

import pytest

from kvasir.bench.trend import trend


def test_a_line_is_found_whatever_order_its_points_come_in() -> None:
    samples = [(float(at_s), 100.0 + 2.0 * at_s) for at_s in range(101)]
    random.Random(0).shuffle(samples)
    found = trend(samples)
    assert found is not None
    assert found.per_s == pytest.approx(2.0)
    assert found.median == 200.0
    assert found.span_s == 100.0
    assert found.growth == pytest.approx(1.0), "from 100 to 300, with 200 between"


def test_a_few_outliers_tilt_nothing() -> None:
    samples = [(float(at_s), 50.0) for at_s in range(200)]
    samples[190] = (190.0, 5000.0)
    samples[3] = (3.0, 0.0)
    found = trend(samples)
    assert found is not None
    assert found.growth == 0.0


@pytest.mark.parametrize("samples", [[], [(0.0, 1.0), (1.0, 2.0)], [(5.0, 1.0)] * 9])
def test_too_few_samples_have_no_trend(samples: list[tuple[float, float]]) -> None:
    assert trend(samples) is None


def test_nothing_at_all_does_not_grow() -> None:
    found = trend([(float(at_s), 0.0) for at_s in range(9)])
    assert found is not None
    assert found.growth == 0.0
