"""The command line of `kvasir bench serve`, by vLLM's names."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.command_line import new_parser, not_negative, pair, positive, several
from kvasir.bench.report import METRICS
from kvasir.bench.target import TargetOptions, add_target_options, target_options_of
from kvasir.bench.timeline import Objectives
from kvasir.bench.workload import RandomLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(TargetOptions):
    dataset_name: str
    dataset_path: Path | None
    num_prompts: int
    lengths: RandomLengths
    custom_output_len: int
    prompt_format: str
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    num_warmups: int
    ready_check_timeout_s: float
    seed: int
    objectives: Objectives | None
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    label: str | None
    metadata: dict[str, str]
    save_result: bool
    save_detailed: bool
    result_dir: Path
    result_filename: str | None
    plot: Path | None
    disable_progress: bool


def parse_options(argv: list[str], doc: str | None) -> ServeOptions:
    """Parse, or explain on stderr what is wrong and exit with status 2."""
    parser = new_parser("serve", doc)
    add_target_options(parser)
    _add_prompts(parser.add_argument_group("prompts").add_argument)
    _add_load(parser.add_argument_group("load").add_argument)
    _add_report(parser.add_argument_group("report").add_argument)
    given = parser.parse_args(argv)
    if given.dataset_name == "custom" and given.dataset_path is None:
        parser.error("--dataset-name custom wants --dataset-path FILE")
    if given.prompt_format == "ids" and given.tokenizer is None and given.dataset_name == "random":
        parser.error("--prompt-format ids wants --tokenizer DIRECTORY")
    if given.prompt_format == "ids" and given.backend == "openai-chat":
        parser.error("--prompt-format ids wants --backend openai: a chat takes text")
    try:
        lengths = RandomLengths(
            input_len=given.random_input_len,
            output_len=given.random_output_len,
            range_ratio=given.random_range_ratio,
            prefix_len=given.random_prefix_len,
        )
    except ValueError as error:
        parser.error(str(error))
    return target_options_of(
        ServeOptions,
        given,
        lengths=lengths,
        objectives=Objectives(**dict(given.goodput)) if given.goodput else None,
        metadata=dict(given.metadata),
        save_result=given.save_result or given.save_detailed or given.result_filename is not None,
    )


def _add_prompts(add: Any) -> None:
    add("--dataset-name", choices=["random", "custom"], default="random", help="custom: lines of JSON in a file")
    add("--dataset-path", type=Path, metavar="FILE", help='each line {"prompt": ..., "output_tokens": ...}')
    add("--num-prompts", type=positive(int), default=100, help="how many requests")
    add("--random-input-len", type=int, default=1024, help="tokens of a prompt; words without --tokenizer")
    add("--random-output-len", type=int, default=128, help="tokens to generate")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, up and down")
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with")
    add("--custom-output-len", type=positive(int), default=256, help="for lines without output_tokens")
    add("--prompt-format", choices=["text", "ids"], default="text", help="how random prompts are sent")
    add("--seed", type=int, default=0, help="of prompts and arrival times")


def _add_load(add: Any) -> None:
    add("--request-rate", type=positive(float), default=math.inf, help="requests per second; inf: all at once")
    add("--burstiness", type=positive(float), default=1.0, help="1: Poisson; less: bursts; more: even")
    add("--max-concurrency", type=positive(int), help="most requests in flight at once")
    add("--num-warmups", type=not_negative(int), default=0, help="requests before the measured ones")
    add("--ready-check-timeout-sec", dest="ready_check_timeout_s", metavar="S", type=not_negative(float), default=0.0,
        help="seconds to wait for a first answer; 0: do not ask")  # fmt: skip


def _add_report(add: Any) -> None:
    add("--percentile-metrics", dest="metrics", type=_metrics, default=("ttft", "tpot", "itl", "e2el"),
        metavar="NAMES", help=f"of {', '.join(METRICS)}; separated by commas")  # fmt: skip
    add("--metric-percentiles", dest="percentiles", type=several(_percent), default=(99.0,), metavar="P,..",
        help="for example 50,90,99")  # fmt: skip
    add("--goodput", type=_objective, nargs="+", default=[], metavar="NAME:MS",
        help="limits in milliseconds, for example ttft:500 tpot:50 e2el:5000")  # fmt: skip
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="and in it each request")
    add("--result-dir", type=Path, default=Path(), metavar="DIR", help="where to")
    add("--result-filename", metavar="NAME", help="its name (default: from backend, rate, model and time)")
    add("--metadata", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="added to the JSON file")
    add("--label", help="of this run, for the JSON file (default: the backend)")
    add("--plot", type=Path, metavar="PNG", help="draw the distributions")
    add("--disable-tqdm", dest="disable_progress", action="store_true", help="no progress bar")


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"unknown metric {min(unknown)!r}; choose from {', '.join(METRICS)}")
    return names


def _percent(text: str) -> float:
    try:
        percent = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wants numbers separated by commas, got {text!r}") from error
    if not 0 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"percentiles lie in 0..100, got {text!r}")
    return percent


def _objective(text: str) -> tuple[str, float]:
    """`ttft:500` -> ("ttft_s", 0.5)"""
    name, _, milliseconds = text.partition(":")
    try:
        limit_s = float(milliseconds) / 1e3
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wants NAME:MILLISECONDS, got {text!r}") from error
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"knows ttft, tpot and e2el, got {name!r}")
    return f"{name}_s", limit_s
