"""`kvasir bench latency`: one request after the other, of given lengths; TTFT, ITL and the time to the end.

The names are those of vLLM's `bench latency`, which runs an engine in its own process; this asks a server over HTTP.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench import report
from kvasir.bench.load_generator import LoadResult, run_load
from kvasir.bench.openai_client import Outcome, ask
from kvasir.bench.options import TargetOptions, add_target_options, positive, target_fields
from kvasir.bench.serve import fixed_prompts, open_session, resolve_endpoint, tokenizer_of
from kvasir.bench.timeline import percentile
from kvasir.bench.workload import Prompt

_PERCENTS = (10, 25, 50, 75, 90, 99)
_METRICS = ("ttft", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions(TargetOptions):
    input_len: int
    output_len: int
    batch_size: int
    num_iters_warmup: int
    num_iters: int
    seed: int
    output_json: Path | None


def parse_options(argv: list[str]) -> LatencyOptions:
    parser = argparse.ArgumentParser(
        prog="kvasir bench latency",
        description="How long one request takes, on any OpenAI endpoint that has nothing else to do.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_target_options(parser, ignore_eos=True)
    add = parser.add_argument_group("load").add_argument
    add("--input-len", type=positive(int), default=32, help="tokens of a prompt; words where no tokenizer is given")
    add("--output-len", type=positive(int), default=128, help="tokens to generate")
    add("--batch-size", type=positive(int), default=1, help="requests sent together; the next when all have ended")
    add("--num-iters-warmup", type=int, default=3, help="iterations before the measured ones")
    add("--num-iters", type=positive(int), default=30, help="iterations that are measured")
    add("--seed", type=int, default=0, help="of the prompts; each is new, so that no prefix cache helps")
    add("--output-json", type=Path, metavar="FILE", help="write the result")
    given = parser.parse_args(argv)
    if given.num_iters_warmup < 0:
        parser.error(f"--num-iters-warmup must be at least 0, got {given.num_iters_warmup}")
    return LatencyOptions(
        **target_fields(given),
        input_len=given.input_len,
        output_len=given.output_len,
        batch_size=given.batch_size,
        num_iters_warmup=given.num_iters_warmup,
        num_iters=given.num_iters,
        seed=given.seed,
        output_json=given.output_json,
    )


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    try:
        result = asyncio.run(measure(options))
    except (ValueError, OSError) as error:
        print(f"kvasir bench latency: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvasir bench latency: stopped", file=sys.stderr)
        return 130
    print(report.table(result, _METRICS, (90.0, 99.0), title="Latency Benchmark Result"))
    print(f"Avg latency: {result['avg_latency']} seconds")
    for percent, seconds in result["percentiles"].items():
        print(f"{percent}% percentile latency: {seconds} seconds")
    if options.output_json:
        options.output_json.write_text(json.dumps(result, indent=4) + "\n")
    return 0


async def measure(options: LatencyOptions) -> dict[str, Any]:
    """All of what came of it; ValueError if a request failed: a latency without it would be a lie."""
    num_iters = options.num_iters_warmup + options.num_iters
    lengths = options.input_len, options.output_len
    prompts = fixed_prompts(options, tokenizer_of(options), num_iters * options.batch_size, *lengths, options.seed)
    batches = [prompts[start : start + options.batch_size] for start in range(0, len(prompts), options.batch_size)]
    async with open_session() as session:
        endpoint = await resolve_endpoint(options, session)

        async def send(prompt: Prompt) -> Outcome:
            return await ask(session, endpoint, prompt)

        loads = [await run_load(batch, [0.0] * len(batch), send) for batch in batches][options.num_iters_warmup :]
    outcomes = tuple(outcome for load in loads for outcome in load.outcomes)
    whole = LoadResult(outcomes, sum(load.duration_s for load in loads))
    report.refuse_failures(whole)
    latencies_s = [load.duration_s for load in loads]
    return report.summarize(whole, _METRICS, (90.0, 99.0)) | {
        "model_id": endpoint.model,
        "batch_size": options.batch_size,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "avg_latency": sum(latencies_s) / len(latencies_s),
        "latencies": latencies_s,
        "percentiles": {str(percent): percentile(latencies_s, percent) for percent in _PERCENTS},
    }
