"""`kvasir bench serve`: load on any OpenAI endpoint: TTFT, TPOT, ITL, end-to-end latency, throughput, goodput.

The exit status is 1 if any request failed.
"""

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from kvasir.bench import report
from kvasir.bench.load_generator import LoadResult, Send, run_load
from kvasir.bench.openai_client import Endpoint, ask, open_session
from kvasir.bench.plot import plot_distributions
from kvasir.bench.progress import progress_bar
from kvasir.bench.serve_options import ServeOptions, parse_options
from kvasir.bench.tokenizer import DirectoryTokenizer
from kvasir.bench.workload import Prompt, arrival_times_s, custom_prompts, random_prompts

_READY_POLL_S = 1.0
_SHOWN_ERRORS = 10


def main(argv: list[str]) -> int:
    return asyncio.run(run(parse_options(argv, __doc__)))


async def run(options: ServeOptions) -> int:
    tokenizer = options.open_tokenizer()
    async with open_session() as session:
        endpoint = await options.resolve(session)
        print(f"Model {endpoint.model} at {endpoint.url}; making {options.num_prompts} prompts.", file=sys.stderr)
        prompts = await asyncio.to_thread(make_prompts, options, tokenizer)
        count_tokens = (lambda text: len(tokenizer.encode(text))) if tokenizer else None
        load = await measure(options, partial(ask, session, endpoint, count_tokens=count_tokens), prompts)
    result = describe(options, endpoint) | report.summarize(
        load, options.metrics, options.percentiles, options.objectives
    )
    print(report.table(result, options.metrics, options.percentiles))
    _show_errors(load)
    _save(options, result, load)
    return 1 if result["failed"] else 0


def make_prompts(options: ServeOptions, tokenizer: DirectoryTokenizer | None) -> list[Prompt]:
    if options.dataset_name == "custom":
        assert options.dataset_path is not None, "parse_options sees to it"
        return custom_prompts(options.dataset_path, options.num_prompts, options.custom_output_len)
    as_ids = options.prompt_format == "ids"
    return random_prompts(options.num_prompts, options.lengths, options.seed, tokenizer, as_ids)


async def measure(options: ServeOptions, send: Send, prompts: list[Prompt]) -> LoadResult:
    if options.ready_check_timeout_s > 0:
        await _wait_for_answer(send, prompts[0], options.ready_check_timeout_s)
    warmups = [prompts[index % len(prompts)] for index in range(options.num_warmups)]
    await run_load(warmups, send, None, options.max_concurrency)
    arrivals_s = arrival_times_s(len(prompts), options.request_rate, options.burstiness, random.Random(options.seed))
    with progress_bar(len(prompts), enabled=not options.disable_progress) as advance:
        return await run_load(prompts, send, arrivals_s, options.max_concurrency, advance)


async def _wait_for_answer(send: Send, prompt: Prompt, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        outcome = await send(prompt)
        if outcome.timeline is not None:
            return
        if time.monotonic() > deadline_s:
            raise ValueError(f"no answer within {timeout_s:g} s: {outcome.error}")
        await asyncio.sleep(_READY_POLL_S)


def describe(options: ServeOptions, endpoint: Endpoint) -> dict[str, Any]:
    """What was asked for, in the keys of vLLM's result files."""
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": endpoint.backend,
        "backend": endpoint.backend,
        "label": options.label,
        "model_id": endpoint.model,
        "tokenizer_id": str(options.tokenizer) if options.tokenizer else endpoint.model,
        "num_prompts": options.num_prompts,
        **options.metadata,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def _show_errors(load: LoadResult) -> None:
    """Each kind once, the most frequent ones first."""
    errors = Counter(outcome.error for outcome in load.outcomes if outcome.timeline is None)
    for error, count in errors.most_common(_SHOWN_ERRORS):
        print(f"{count} of {len(load.outcomes)} requests failed: {error}", file=sys.stderr)
    if len(errors) > _SHOWN_ERRORS:
        print(f"... and {len(errors) - _SHOWN_ERRORS} more kinds of errors", file=sys.stderr)


def _save(options: ServeOptions, result: dict[str, Any], load: LoadResult) -> None:
    if options.save_result:
        path = options.result_dir / (options.result_filename or default_filename(result))
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = result | report.details(load) if options.save_detailed else result
        path.write_text(json.dumps(whole, indent=None if options.save_detailed else 2) + "\n")
        print(f"saved {path}", file=sys.stderr)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_distributions(load, options.plot, f"{result['model_id']}: {result['completed']} requests")
        print(f"drew {options.plot}", file=sys.stderr)


def default_filename(result: dict[str, Any]) -> str:
    concurrency = f"-concurrency{result['max_concurrency']}" if result["max_concurrency"] else ""
    label = result["label"] or result["backend"]
    model = Path(result["model_id"]).name
    return f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
