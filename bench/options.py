"""The command line of `kvasir bench serve`, and what all benchmarks ask about an endpoint: vLLM's names."""

import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.openai_client import DEFAULT_PATHS, Backend
from kvasir.bench.report import METRICS
from kvasir.bench.timeline import Objectives
from kvasir.bench.workload import RandomLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Whom to ask, and what each request carries besides its prompt."""

    base_url: str
    backend: Backend
    endpoint: str | None
    model: str | None
    tokenizer: Path | None
    ignore_eos: bool
    extra_body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(TargetOptions):
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


def parse_options(argv: list[str]) -> BenchOptions:
    """Parse, or explain on stderr what is wrong and exit with status 2."""
    parser = _parser()
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
    return _options(given, lengths)


def _options(given: argparse.Namespace, lengths: RandomLengths) -> BenchOptions:
    return BenchOptions(
        **target_fields(given),
        dataset_name=given.dataset_name,
        dataset_path=given.dataset_path,
        num_prompts=given.num_prompts,
        lengths=lengths,
        custom_output_len=given.custom_output_len,
        prompt_format=given.prompt_format,
        request_rate=given.request_rate,
        burstiness=given.burstiness,
        max_concurrency=given.max_concurrency,
        num_warmups=given.num_warmups,
        ready_check_timeout_s=given.ready_check_timeout_sec,
        seed=given.seed,
        objectives=Objectives(**dict(given.goodput)) if given.goodput else None,
        metrics=given.percentile_metrics,
        percentiles=given.metric_percentiles,
        label=given.label,
        metadata=dict(given.metadata),
        save_result=given.save_result or given.save_detailed or given.result_filename is not None,
        save_detailed=given.save_detailed,
        result_dir=given.result_dir,
        result_filename=given.result_filename,
        plot=given.plot,
        disable_progress=given.disable_tqdm,
    )


def target_fields(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of TargetOptions, of what was added by add_target_options."""
    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    headers = dict(given.header)
    if (api_key := os.environ.get("OPENAI_API_KEY")) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {api_key}"
    return {
        "base_url": given.base_url,
        "backend": given.backend,
        "endpoint": given.endpoint,
        "model": given.model,
        "tokenizer": given.tokenizer,
        "ignore_eos": given.ignore_eos,
        "extra_body": {name: value for name, value in sampling.items() if value is not None} | given.extra_body,
        "headers": headers,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvasir bench serve",
        description="Measure any OpenAI endpoint: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_target_options(parser)
    _add_dataset(parser.add_argument_group("prompts"))
    _add_load(parser.add_argument_group("load"))
    _add_report(parser.add_argument_group("report"))
    return parser


def add_target_options(parser: argparse.ArgumentParser, ignore_eos: bool = False) -> None:
    """ignore_eos: whether all tokens asked for are generated where the command line does not say."""
    add = parser.add_argument_group("endpoint").add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="the server")
    add("--backend", choices=list(DEFAULT_PATHS), default="openai", help="completions, or chat completions")
    add("--endpoint", help="path of the API (default: the backend's)")
    add("--model", help="its name for the API (default: the first one that the server lists)")
    add("--tokenizer", type=Path, metavar="DIR", help="model directory, for random prompts of exact length")
    add("--header", type=_pair, nargs="*", default=[], metavar="NAME=VALUE", help="sent with each request")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="fields added to each request")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=ignore_eos,
        help="generate all tokens asked for; a field that servers other than vLLM and Kvasir may refuse",
    )
    for name in ("--temperature", "--top-p", "--min-p"):
        add(name, type=float, help="sampling parameter; not sent unless given")
    add("--top-k", type=int, help="sampling parameter; not sent unless given")


def _add_dataset(group: Any) -> None:
    add = group.add_argument
    add("--dataset-name", choices=["random", "custom"], default="random", help="custom: lines of JSON in a file")
    add("--dataset-path", type=Path, metavar="FILE", help='each line {"prompt": ..., "output_tokens": ...}')
    add("--num-prompts", type=positive(int), default=100, help="how many requests")
    add("--random-input-len", type=int, default=1024, help="tokens; words where no tokenizer is given")
    add("--random-output-len", type=int, default=128, help="tokens to generate")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, up and down")
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with")
    add("--custom-output-len", type=positive(int), default=256, help="for lines without output_tokens")
    add("--prompt-format", choices=["text", "ids"], default="text", help="how random prompts are sent")
    add("--seed", type=int, default=0, help="of prompts and arrival times")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add("--request-rate", type=positive(float), default=math.inf, help="requests per second; inf: all at once")
    add("--burstiness", type=positive(float), default=1.0, help="1: Poisson; less: bursts; more: even")
    add("--max-concurrency", type=positive(int), help="most requests in flight at once")
    add("--num-warmups", type=int, default=0, help="requests before the measured ones")
    add("--ready-check-timeout-sec", type=float, default=0.0, help="wait so long for a first answer; 0: do not ask")


def _add_report(group: Any) -> None:
    add = group.add_argument
    add("--percentile-metrics", type=_metrics, default=("ttft", "tpot", "itl", "e2el"), help=",".join(METRICS))
    add("--metric-percentiles", type=_percentiles, default=(99.0,), help="for example 50,90,99")
    add("--goodput", type=_objective, nargs="+", default=[], metavar="NAME:MS", help="ttft:500 tpot:50 e2el:5000")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="and in it each request")
    add("--result-dir", type=Path, default=Path(), help="where to")
    add("--result-filename", help="its name (default: from backend, rate, model and time)")
    add("--metadata", type=_pair, nargs="*", default=[], metavar="KEY=VALUE", help="added to the JSON file")
    add("--label", help="of this run, for the JSON file (default: the backend)")
    add("--plot", type=Path, metavar="PNG", help="draw the distributions")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    return parse


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"wants NAME=VALUE, got {text!r}")
    return name, value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"wants a JSON object, got {text!r}")
    return value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"unknown metric {min(unknown)!r}; choose from {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        percents = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wants numbers with commas, got {text!r}") from error
    if not all(0 <= percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"percentiles lie in 0..100, got {text!r}")
    return percents


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
