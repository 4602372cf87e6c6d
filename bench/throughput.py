"""`kvasir bench throughput`: all requests at once; requests and tokens per second.

The names are those of vLLM's `bench throughput`, which runs an engine in its own process; this asks a server over HTTP.
"""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.bench import report
from kvasir.bench.command_line import new_parser, positive
from kvasir.bench.load_generator import run_load
from kvasir.bench.openai_client import ask, open_session
from kvasir.bench.progress import progress_bar
from kvasir.bench.target import FixedLengthOptions, add_length_options, add_target_options, target_options_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions(FixedLengthOptions):
    num_prompts: int
    max_concurrency: int | None
    output_json: Path | None
    disable_progress: bool


def parse_options(argv: list[str]) -> ThroughputOptions:
    parser = new_parser("throughput", __doc__)
    add_target_options(parser, ignore_eos=True)
    add = parser.add_argument_group("load").add_argument
    add_length_options(add, input_len=128, output_len=128)
    add("--num-prompts", type=positive(int), default=200, help="how many requests, all sent at once")
    add("--max-concurrency", type=positive(int), help="most requests in flight, for a server that refuses more")
    add("--output-json", type=Path, metavar="FILE", help="write the result")
    add("--disable-tqdm", dest="disable_progress", action="store_true", help="no progress bar")
    return target_options_of(ThroughputOptions, parser.parse_args(argv))


def main(argv: list[str]) -> int:
    options = parse_options(argv)
    result = asyncio.run(measure(options))
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
    prompts = options.prompts(options.num_prompts, options.open_tokenizer())
    async with open_session() as session:
        endpoint = await options.resolve(session)
        with progress_bar(len(prompts), enabled=not options.disable_progress) as advance:
            send = partial(ask, session, endpoint)
            load = await run_load(prompts, send, None, options.max_concurrency, advance)
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
