"""Each definition on timestamps that can be checked by hand."""

import pytest

from kvasir.bench.timeline import (
    Objectives,
    Timeline,
    goodput_rps,
    peak_concurrency,
    peak_tokens_per_s,
    percentile,
)

FOUR = Timeline(sent_s=10.0, arrivals_s=(10.5, 10.6, 10.9, 11.0), num_output_tokens=6)
ONE = Timeline(sent_s=11.0, arrivals_s=(12.5,), num_output_tokens=1)


def test_latencies_of_one_request() -> None:
    assert FOUR.ttft_s == pytest.approx(0.5)
    assert FOUR.itls_s == pytest.approx([0.1, 0.3, 0.1])
    assert FOUR.e2el_s == pytest.approx(1.0)


def test_tpot_counts_tokens_not_chunks() -> None:
    assert FOUR.tpot_s == pytest.approx(0.5 / 5)


def test_one_token_has_no_tpot_and_no_itl() -> None:
    assert ONE.tpot_s is None
    assert ONE.itls_s == []


def test_no_chunk_no_timeline() -> None:
    with pytest.raises(ValueError, match="chunk"):
        Timeline(sent_s=0.0, arrivals_s=(), num_output_tokens=0)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (Objectives(), 2),
        (Objectives(ttft_s=0.6), 1),
        (Objectives(ttft_s=2.0, tpot_s=0.2), 2),  # a TPOT that does not exist counts as met
        (Objectives(ttft_s=2.0, tpot_s=0.05), 1),
        (Objectives(e2el_s=1.2), 1),
        (Objectives(ttft_s=0.1), 0),
    ],
)
def test_goodput_asks_for_every_objective(objectives: Objectives, good: int) -> None:
    assert goodput_rps([FOUR, ONE], objectives, duration_s=4.0) == good / 4.0


def test_peak_tokens_are_counted_by_the_second() -> None:
    # Seconds count from 10.0: three chunks in the first, one each in the second and third.
    assert peak_tokens_per_s([FOUR, ONE]) == 3.0
    assert peak_tokens_per_s([]) == 0.0


def test_a_request_that_begins_as_another_ends_does_not_overlap() -> None:
    assert peak_concurrency([FOUR, ONE]) == 1
    assert peak_concurrency([FOUR, FOUR, ONE]) == 2
    assert peak_concurrency([]) == 0


@pytest.mark.parametrize(("percent", "expected"), [(0, 10.0), (25, 17.5), (50, 25.0), (100, 40.0), (99, 39.7)])
def test_percentile_interpolates(percent: float, expected: float) -> None:
    assert percentile([40.0, 10.0, 30.0, 20.0], percent) == pytest.approx(expected)


def test_percentile_of_one_and_of_none() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 99) == 0.0
