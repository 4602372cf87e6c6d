"""What a benchmark found: the keys and the table of vLLM's `bench serve`."""

import statistics
from collections.abc import Sequence
from typing import Any

from kvasir.bench.load_generator import LoadResult
from kvasir.bench.timeline import (
    Objectives,
    Timeline,
    goodput_rps,
    peak_concurrency,
    peak_tokens_per_s,
    percentile,
)

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
}
_MS = 1e3


def timelines_of(load: LoadResult) -> list[Timeline]:
    """Of the requests that succeeded."""
    return [outcome.timeline for outcome in load.outcomes if outcome.timeline is not None]


def refuse_failures(load: LoadResult) -> None:
    """ValueError if a request failed."""
    errors = [outcome.error for outcome in load.outcomes if outcome.timeline is None]
    if errors:
        raise ValueError(f"{len(errors)} of {len(load.outcomes)} requests failed, the first with: {errors[0]}")


def samples_s(load: LoadResult, metric: str) -> list[float]:
    """All values of one of METRICS, in seconds."""
    timelines = timelines_of(load)
    if metric == "itl":
        return [gap for timeline in timelines for gap in timeline.itls_s]
    if metric == "client_queue_time":
        return [outcome.queued_s for outcome in load.outcomes if outcome.timeline is not None]
    values = [getattr(timeline, f"{metric}_s") for timeline in timelines]
    return [value for value in values if value is not None]


def summarize(
    load: LoadResult, metrics: Sequence[str], percentiles: Sequence[float], objectives: Objectives | None = None
) -> dict[str, Any]:
    """The totals, and mean, median, standard deviation and percentiles of each of the metrics."""
    timelines = timelines_of(load)
    num_input = sum(outcome.num_prompt_tokens for outcome in load.outcomes if outcome.timeline is not None)
    num_output = sum(timeline.num_output_tokens for timeline in timelines)
    result: dict[str, Any] = {
        "duration": load.duration_s,
        "completed": len(timelines),
        "failed": len(load.outcomes) - len(timelines),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(timelines) / load.duration_s,
        "request_goodput": goodput_rps(timelines, objectives, load.duration_s) if objectives else None,
        "output_throughput": num_output / load.duration_s,
        "total_token_throughput": (num_input + num_output) / load.duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s(timelines),
        "max_concurrent_requests": peak_concurrency(timelines),
    }
    for metric in metrics:
        result |= statistics_ms(metric, samples_s(load, metric), percentiles)
    return result


def statistics_ms(metric: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = [value * _MS for value in values_s] or [0.0]
    found = {
        f"mean_{metric}_ms": statistics.fmean(values),
        f"median_{metric}_ms": statistics.median(values),
        f"std_{metric}_ms": statistics.pstdev(values),
    }
    return found | {f"p{percent:g}_{metric}_ms": percentile(values, percent) for percent in percentiles}


def details(load: LoadResult) -> dict[str, Any]:
    """One entry a request, in the order of the prompts; a failed one has zeros and its error."""
    lines = [outcome.timeline for outcome in load.outcomes]
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in load.outcomes],
        "output_lens": [line.num_output_tokens if line else 0 for line in lines],
        "ttfts": [line.ttft_s if line else 0.0 for line in lines],
        "itls": [line.itls_s if line else [] for line in lines],
        "latencies": [line.e2el_s if line else 0.0 for line in lines],
        "start_times": [outcome.sent_s for outcome in load.outcomes],
        "queue_times": [outcome.queued_s for outcome in load.outcomes],
        "generated_texts": [outcome.text for outcome in load.outcomes],
        "errors": [outcome.error for outcome in load.outcomes],
    }


def table(
    result: dict[str, Any],
    metrics: Sequence[str],
    percentiles: Sequence[float],
    title: str = "Serving Benchmark Result",
) -> str:
    """The human's view of `result`, 50 columns wide."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if result.get("max_concurrency"):
        rows.append(("Maximum request concurrency:", result["max_concurrency"]))
    if isinstance(result.get("request_rate"), float):
        rows.append(("Request rate configured (RPS):", result["request_rate"]))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [f"{f' {title} ':=^50}", *map(_row, rows)]
    for metric in metrics:
        lines += _metric_lines(result, metric, percentiles)
    return "\n".join([*lines, "=" * 50])


def _metric_lines(result: dict[str, Any], metric: str, percentiles: Sequence[float]) -> list[str]:
    name, header = METRICS[metric]
    rows = [(f"{word.capitalize()} {name} (ms):", result[f"{word}_{metric}_ms"]) for word in ("mean", "median")]
    rows += [(f"P{percent:g} {name} (ms):", result[f"p{percent:g}_{metric}_ms"]) for percent in percentiles]
    return [f"{header:-^50}", *map(_row, rows)]


def _row(row: tuple[str, Any]) -> str:
    label, value = row
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
