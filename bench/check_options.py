"""The command line of `kvasir bench check`."""

from dataclasses import dataclass
from pathlib import Path

from kvasir.bench.command_line import new_parser, positive, several
from kvasir.bench.target import FixedLengthOptions, add_length_options, add_target_options, target_options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """What a service must keep to pass."""

    memory_growth: float  # share of the median, over the soak
    latency_growth: float  # likewise
    p99_ms: float | None  # of the soak's requests, to the end; None: by the ratio
    p99_ratio: float  # to the median


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(FixedLengthOptions):
    concurrency: tuple[int, ...]
    soak_minutes: float
    soak_concurrency: int
    metrics: tuple[str, ...]
    limits: CheckLimits
    output: Path


def parse_options(argv: list[str], doc: str | None = None) -> CheckOptions:
    parser = new_parser("check", doc)
    add_target_options(parser, ignore_eos=True)
    add = parser.add_argument_group("load").add_argument
    counts = several(positive(int))
    add("--concurrency", type=counts, default=(50, 100, 200), metavar="N,..", help="so many requests at once")
    add_length_options(add, input_len=64, output_len=32)
    add("--soak-minutes", type=positive(float), default=30.0, help="how long it is kept busy at the end")
    add("--soak-concurrency", type=positive(int), default=8, help="requests at once meanwhile")
    add("--metrics", nargs="+", default=[], metavar="URL", help="/metrics of processes whose memory is watched; "
        "beside that of the endpoint itself")  # fmt: skip
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
    return target_options_of(CheckOptions, given, limits=limits, metrics=tuple(given.metrics))
