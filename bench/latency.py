"""`kvasir bench latency`: one request after the other, of given lengths; TTFT, ITL and the time to the end.

The names are those of vLLM's `bench latency`, which runs an engine in its own process; this asks a server over HTTP.
"""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.bench import report
from kvasir.bench.command_line import new_parser, not_negative, positive
from kvasir.bench.load_generator import LoadResult, run_load
from kvasir.bench.openai_client import ask, open_session
from kvasir.bench.target import FixedLengthOptions, add_length_options, add_target_options, target_options_of
from kvasir.bench.timeline import percentile

_PERCENTS = (10, 25, 50, 75, 90, 99)
_METRICS = ("ttft", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(FixedLengthOptions):
    batch_size: int
    num_iters_warmup: int
    num_iters: int
    output_json: Path | None


def parse_options(argv: list[str]) -> LatencyOptions:
    parser = new_parser("latency", __doc__)
    add_target_options(parser, ignore_eos=True)
    add = parser.add_argument_group("load").add_argument
    add_length_options(add, input_len=32, output_len=128)
    add("--batch-size", type=positive(int), default=1, help="requests sent together; the next when all have ended")
    add("--num-iters-warmup", type=not_negative(int), default=3, help="iterations before the measured ones")
    add("--num-iters", type=positive(int), default=30, help="iterations that are measured")
    add("--output-json", type=Path, metavar="FILE", help="write the result")
    return target_options_of(LatencyOptions, parser.parse_args(argv))


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    result = asyncio.run(measure(options))
    print(report.table(result, _METRICS, (90.0, 99.0), title="Latency Benchmark Result"))
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percent, seconds in result["percentiles"].items():
        print(f"{percent}% percentile latency: {seconds} seconds")
    if options.output_json:
        options.output_json.write_text(json.dumps(result, indent=4) + "\n")
    return 0


async def measure(options: LatencyOptions) -> dict[str, Any]:
    """All of what came of it; ValueError if a request failed: a latency without it would be a lie."""
    size, num_iters = options.batch_size, options.num_iters_warmup + options.num_iters
    prompts = options.prompts(num_iters * size, options.open_tokenizer())
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    async with open_session() as session:
        endpoint = await options.resolve(session)
        loads = [await run_load(batch, partial(ask, session, endpoint)) for batch in batches]
    loads = loads[options.num_iters_warmup :]
    outcomes = tuple(outcome for load in loads for outcome in load.outcomes)
    whole = LoadResult(outcomes, sum(load.duration_s for load in loads))
    report.refuse_failures(whole)
    latencies_s = [load.duration_s for load in loads]
    return report.summarize(whole, _METRICS, (90.0, 99.0)) | {
        "model_id": endpoint.model,
        "batch_size": size,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "avg_latency": sum(latencies_s) / len(latencies_s),
        "latencies": latencies_s,
        "percentiles": {str(percent): percentile(latencies_s, percent) for percent in _PERCENTS},
    }
