"""Greedy requests to an endpoint, each to its full length; one that fails ends the measurement."""

import asyncio
from collections.abc import Sequence
from functools import partial

from kvasir.bench.load_generator import LoadResult, run_load
from kvasir.bench.openai_client import Endpoint, ask, first_model, open_session
from kvasir.bench.report import refuse_failures
from kvasir.bench.workload import Prompt


def as_prompt(token_ids: Sequence[int], num_output_tokens: int) -> Prompt:
    return Prompt(content=tuple(token_ids), num_output_tokens=num_output_tokens)


def greedy_load(
    url: str,
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float] | None = None,
    max_concurrency: int | None = None,
) -> LoadResult:
    """arrivals_s: None: all at once. ValueError: a request failed, and a number without it would be a lie."""
    load = asyncio.run(_run(url, prompts, arrivals_s, max_concurrency))
    refuse_failures(load)
    return load


async def _run(
    url: str, prompts: Sequence[Prompt], arrivals_s: Sequence[float] | None, max_concurrency: int | None
) -> LoadResult:
    async with open_session() as session:
        model = await first_model(session, url, {})
        endpoint = Endpoint(base_url=url, model=model, extra_body={"temperature": 0}, ignore_eos=True)
        return await run_load(prompts, partial(ask, session, endpoint), arrivals_s, max_concurrency)
