"""The command line of `kvasir bench check`."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvasir.bench.options import TargetOptions, add_target_options, positive, target_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """What a service must keep to pass."""

    memory_growth: float  # share of the median, over the soak
    latency_growth: float  # likewise
    p99_ms: float | None  # of the soak's requests, to the end; None: by the ratio
    p99_ratio: float  # to the median


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(TargetOptions):
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    soak_minutes: float
    soak_concurrency: int
    metrics: tuple[str, ...]
    limits: CheckLimits
    seed: int
    output: Path


def parse_options(argv: list[str]) -> CheckOptions:
    parser = argparse.ArgumentParser(
        prog="kvasir bench check",
        description="Is a new service fit to go live? One request, many at once, a soak; a report of one page.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_target_options(parser, ignore_eos=True)
    add = parser.add_argument_group("load").add_argument
    add("--concurrency", type=_counts, default=(50, 100, 200), metavar="N,N,..", help="so many requests at once")
    add("--input-len", type=positive(int), default=64, help="tokens of a prompt; words where no tokenizer is given")
    add("--output-len", type=positive(int), default=32, help="tokens to generate")
    add("--soak-minutes", type=positive(float), default=30.0, help="how long it is kept busy at the end")
    add("--soak-concurrency", type=positive(int), default=8, help="requests at once meanwhile")
    add("--metrics", nargs="+", default=[], metavar="URL", help="/metrics of processes whose memory is watched; "
        "beside that of the endpoint itself")  # fmt: skip
    add("--seed", type=int, default=0, help="of the prompts; each is new")
    add = parser.add_argument_group("to pass").add_argument
    add("--max-memory-growth", type=positive(float), default=0.05, help="share of memory, over the soak")
    add("--max-latency-growth", type=positive(float), default=0.25, help="share of the median latency, over the soak")
    add("--max-p99-ms", type=positive(float), help="of the soak's requests, to their end (default: by the ratio)")
    add("--max-p99-ratio", type=positive(float), default=5.0, help="p99 of the soak's requests to their median")
    add("--output", type=Path, default=Path(), metavar="DIR", help="folder of the report: check.md, check.png")
    given = parser.parse_args(argv)
    limits = CheckLimits(
        memory_growth=given.max_memory_growth,
        latency_growth=given.max_latency_growth,
        p99_ms=given.max_p99_ms,
        p99_ratio=given.max_p99_ratio,
    )
    return CheckOptions(
        **target_fields(given),
        concurrency=given.concurrency,
        input_len=given.input_len,
        output_len=given.output_len,
        soak_minutes=given.soak_minutes,
        soak_concurrency=given.soak_concurrency,
        metrics=tuple(given.metrics),
        limits=limits,
        seed=given.seed,
        output=given.output,
    )


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wants numbers with commas, got {text!r}") from error
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
    return counts
