"""Metrics must never hurt a request, whatever is fed to them."""

import logging
import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvasir.common.metrics import ITL_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS, TTFT_BUCKETS_S, Metrics, Sample


def values(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_vllms_names_come_out_as_vllm_writes_them() -> None:
    metrics = Metrics({"model_name": "m", "engine": "0"})
    metrics.counter("vllm:prompt_tokens", "Prompt tokens.")(7)
    metrics.gauge("vllm:num_requests_running", "Running.")(3)
    metrics.histogram("vllm:inter_token_latency_seconds", "ITL.", ITL_BUCKETS_S)(0.0007)
    found = values(metrics)
    labels = (("engine", "0"), ("model_name", "m"))
    assert found["vllm:prompt_tokens_total", labels] == 7
    assert found["vllm:num_requests_running", labels] == 3
    assert found["vllm:inter_token_latency_seconds_bucket", (labels[0], ("le", "0.0005"), labels[1])] == 0
    assert found["vllm:inter_token_latency_seconds_bucket", (labels[0], ("le", "0.001"), labels[1])] == 1


def test_samples_that_are_known_are_shown_from_the_start() -> None:
    metrics = Metrics({"model_name": "m"})
    counter = metrics.counter("kvasir:things", "Things.", ["kind", "color"])
    counter.show(kind=("a", "b"), color=("red",))
    counter(kind="b", color="red")
    found = {labels: value for (name, labels), value in values(metrics).items() if name == "kvasir:things_total"}
    own = (("color", "red"), ("kind", "a"), ("model_name", "m")), (("color", "red"), ("kind", "b"), ("model_name", "m"))
    assert found == {own[0]: 0, own[1]: 1}


def test_metrics_without_any_label_and_with_zero_samples_are_shown() -> None:
    metrics = Metrics()
    metrics.counter("kvasir:things", "Things.")
    labelled = Metrics({"model_name": "m"})
    labelled.counter("kvasir:things", "Things.")
    assert values(metrics)["kvasir:things_total", ()] == 0
    assert values(labelled)["kvasir:things_total", (("model_name", "m"),)] == 0


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf, -math.inf, "x", None])
@pytest.mark.parametrize("labels", [{}, {"model_name": "m"}])
def test_a_bad_sample_is_dropped_counted_and_logged(
    bad: float, labels: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(labels)
    counter = metrics.counter("kvasir:things", "Things.")
    histogram = metrics.histogram("kvasir:seconds", "Seconds.", TTFT_BUCKETS_S)
    counter(2)
    with caplog.at_level(logging.WARNING):
        counter(bad)
        histogram(bad)
        histogram(bad)
    found = values(metrics)
    own = tuple(labels.items())
    assert found["kvasir:things_total", own] == 2
    assert found["kvasir:seconds_count", own] == 0
    assert found["kvasir:dropped_samples_total", (("metric", "kvasir:things"),)] == 1
    assert found["kvasir:dropped_samples_total", (("metric", "kvasir:seconds"),)] == 2
    assert len(caplog.records) == 2, "one line a metric, not one a sample"


def test_unknown_and_missing_labels_are_dropped() -> None:
    metrics = Metrics({"model_name": "m"})
    counter = metrics.counter("kvasir:misses", "Misses.", ["reason"])
    counter(1, reason="checksum")
    counter(1)
    counter(1, reason="checksum", peer="x")
    counter(1, because="checksum")
    found = values(metrics)
    assert found["kvasir:misses_total", (("model_name", "m"), ("reason", "checksum"))] == 1
    assert found["kvasir:dropped_samples_total", (("metric", "kvasir:misses"),)] == 3


def test_a_gauge_may_be_negative() -> None:
    metrics = Metrics()
    metrics.gauge("kvasir:balance", "Balance.")(-3)
    assert values(metrics)["kvasir:balance", ()] == -3


def test_sampled_values_are_read_at_each_scrape() -> None:
    metrics = Metrics({"model_name": "m"})
    state = {"checksum": 1, "timeout": 2}
    metrics.sampled(
        lambda: [Sample("kvasir:misses", "Misses.", n, {"reason": why}, is_counter=True) for why, n in state.items()]
    )
    assert values(metrics)["kvasir:misses_total", (("model_name", "m"), ("reason", "timeout"))] == 2
    state["timeout"] = 5
    assert values(metrics)["kvasir:misses_total", (("model_name", "m"), ("reason", "timeout"))] == 5


def test_a_failing_source_loses_its_own_values_only() -> None:
    metrics = Metrics()
    metrics.gauge("kvasir:other", "Other.")(1)
    metrics.sampled(lambda: [Sample("kvasir:ok", "Ok.", 1), Sample("kvasir:bad", "Bad.", math.nan)])

    def broken() -> list[Sample]:
        raise RuntimeError("gone")

    metrics.sampled(broken)
    first, second = values(metrics), values(metrics)
    assert first["kvasir:other", ()] == first["kvasir:ok", ()] == 1
    assert ("kvasir:bad", ()) not in first
    assert second["kvasir:dropped_samples_total", (("metric", "sampled"),)] >= 1


def test_buckets_rise() -> None:
    for buckets in (TTFT_BUCKETS_S, ITL_BUCKETS_S, LATENCY_BUCKETS_S, TOKEN_BUCKETS):
        assert list(buckets) == sorted(set(buckets))
    assert ITL_BUCKETS_S[0] == 0.0005
