"""`kvasir bench throughput`: all requests at once; requests and tokens per second.

The names are those of vLLM's `bench throughput`, which runs an engine in its own process; this asks a server over HTTP.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.bench import report
from kvasir.bench.load_generator import run_load
from kvasir.bench.openai_client import Outcome, ask
from kvasir.bench.options import TargetOptions, add_target_options, positive, target_fields
from kvasir.bench.progress import progress_bar
from kvasir.bench.serve import fixed_prompts, open_session, resolve_endpoint, tokenizer_of
from kvasir.bench.workload import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(TargetOptions):
    input_len: int
    output_len: int
    num_prompts: int
    max_concurrency: int | None
    seed: int
    output_json: Path | None
    disable_progress: bool


def parse_options(argv: list[str]) -> ThroughputOptions:
    parser = argparse.ArgumentParser(
        prog="kvasir bench throughput",
        description="How much an OpenAI endpoint does in a second when there is always something to do.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_target_options(parser, ignore_eos=True)
    add = parser.add_argument_group("load").add_argument
    add("--input-len", type=positive(int), default=128, help="tokens of a prompt; words where no tokenizer is given")
    add("--output-len", type=positive(int), default=128, help="tokens to generate")
    add("--num-prompts", type=positive(int), default=200, help="how many requests, all sent at once")
    add("--max-concurrency", type=positive(int), help="most requests in flight, for a server that refuses more")
    add("--seed", type=int, default=0, help="of the prompts; each is new, so that no prefix cache helps")
    add("--output-json", type=Path, metavar="FILE", help="write the result")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    given = parser.parse_args(argv)
    return ThroughputOptions(
        **target_fields(given),
        input_len=given.input_len,
        output_len=given.output_len,
        num_prompts=given.num_prompts,
        max_concurrency=given.max_concurrency,
        seed=given.seed,
        output_json=given.output_json,
        disable_progress=given.disable_tqdm,
    )


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    try:
        result = asyncio.run(measure(options))
    except (ValueError, OSError) as error:
        print(f"kvasir bench throughput: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvasir bench throughput: stopped", file=sys.stderr)
        return 130
    print(report.table(result, (), (), title="Throughput Benchmark Result"))
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total "
        f"tokens/s, {result['output_throughput']:.2f} output tokens/s"
    )
    if options.output_json:
        options.output_json.write_text(json.dumps(result, indent=4) + "\n")
    return 0


async def measure(options: ThroughputOptions) -> dict[str, Any]:
    """All of what came of it; ValueError if a request failed: what it would have cost is not known."""
    prompts = fixed_prompts(
        options, tokenizer_of(options), options.num_prompts, options.input_len, options.output_len, options.seed
    )
    async with open_session() as session:
        endpoint = await resolve_endpoint(options, session)

        async def send(prompt: Prompt) -> Outcome:
            return await ask(session, endpoint, prompt)

        with progress_bar(len(prompts), enabled=not options.disable_progress) as advance:
            load = await run_load(prompts, [0.0] * len(prompts), send, options.max_concurrency, advance)
    report.refuse_failures(load)
    found = report.summarize(load, (), ())
    return found | {
        "model_id": endpoint.model,
        "elapsed_time": found["duration"],
        "num_requests": found["completed"],
        "total_num_tokens": found["total_input_tokens"] + found["total_output_tokens"],
        "requests_per_second": found["request_throughput"],
        "tokens_per_second": found["total_token_throughput"],
    }
