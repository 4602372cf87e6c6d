"""`kvasir bench check`: the procedure for a new service, on any OpenAI endpoint.

One request; many at once, streamed, whole and mixed; then a soak, during which memory and latency must not grow. What
is wrong ends in a line that says FAIL, and in exit status 1.
"""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence

import aiohttp

from kvasir.bench.check_options import CheckOptions, parse_options
from kvasir.bench.check_report import Findings, Phase, as_markdown, draw, judge
from kvasir.bench.load_generator import LoadResult, run_load
from kvasir.bench.openai_client import Endpoint, Outcome, ask, open_session
from kvasir.bench.resident_memory import MemorySamples, process_name, sampled_memory
from kvasir.bench.workload import Prompt

_WAYS = ("streamed", "whole", "mixed")
_MEMORY_SAMPLES = 180  # over the soak
_PAUSE_AFTER_ERROR_S = 0.5  # a service that refuses all is not asked a thousand times a second


def main(argv: list[str]) -> int:
    options = parse_options(argv, __doc__)
    findings = asyncio.run(check(options))
    verdicts = judge(findings, options.limits)
    text = as_markdown(findings, verdicts)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "check.md").write_text(text)
    draw(options.output / "check.png", findings)
    print(text)
    return 0 if all(verdict.passed is not False for verdict in verdicts) else 1


async def check(options: CheckOptions) -> Findings:
    async with open_session() as session:
        endpoint = await options.resolve(session)
        asker = _Asker(options, session, endpoint)
        phases = [await asker.phase(1, way) for way in _WAYS[:2]]
        for concurrency in options.concurrency:
            phases += [await asker.phase(concurrency, way) for way in _WAYS]
        own = f"{options.base_url}/metrics"
        urls = list(dict.fromkeys((own, *options.metrics)))
        soak_s = options.soak_minutes * 60
        async with sampled_memory(session, urls, max(0.05, soak_s / _MEMORY_SAMPLES)) as memory:
            soak = await asker.soak(soak_s)
    return Findings(
        model=endpoint.model,
        url=endpoint.url,
        input_len=options.input_len,
        input_unit="tokens" if options.tokenizer else "words",
        output_len=options.output_len,
        phases=phases,
        soak=soak,
        soak_concurrency=options.soak_concurrency,
        memory=_without_the_silent(memory, own),
    )


def _without_the_silent(memory: MemorySamples, own: str) -> MemorySamples:
    """The endpoint's own /metrics was not asked for by name: if it says nothing, nothing is missing."""
    return {name: samples for name, samples in memory.items() if samples or name != process_name(own)}


class _Asker:
    """Requests to one endpoint, never the same prompt twice."""

    def __init__(self, options: CheckOptions, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        self._options = options
        self._session = session
        self._endpoints = {True: endpoint, False: dataclasses.replace(endpoint, streams=False)}
        self._tokenizer = options.open_tokenizer()
        self._num_batches = 0

    async def phase(self, concurrency: int, way: str) -> Phase:
        """That many requests, all at once."""
        prompts = await self._prompts(concurrency)
        numbers = {id(prompt): number for number, prompt in enumerate(prompts)}

        async def send(prompt: Prompt) -> Outcome:
            return await self._ask(prompt, way == "streamed" or (way == "mixed" and numbers[id(prompt)] % 2 == 0))

        load = await run_load(prompts, send)
        phase = Phase(concurrency=concurrency, way=way, load=load)
        print(phase.line(), file=sys.stderr)
        return phase

    async def soak(self, duration_s: float) -> LoadResult:
        """So many clients, each with its next request when it has the answer to the last; half of them stream."""
        started_s = time.perf_counter()
        outcomes: list[Outcome] = []

        async def client(number: int) -> None:
            while time.perf_counter() - started_s < duration_s:
                (prompt,) = await self._prompts(1)
                outcome = await self._ask(prompt, number % 2 == 0)
                outcomes.append(outcome)
                if outcome.timeline is None:
                    await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

        print(f"soak for {duration_s / 60:g} minutes, {self._options.soak_concurrency} at once", file=sys.stderr)
        async with asyncio.TaskGroup() as group:
            for number in range(self._options.soak_concurrency):
                group.create_task(client(number))
        return LoadResult(tuple(outcomes), time.perf_counter() - started_s)

    async def _ask(self, prompt: Prompt, streams: bool) -> Outcome:
        return await ask(self._session, self._endpoints[streams], prompt)

    async def _prompts(self, count: int) -> Sequence[Prompt]:
        self._num_batches += 1
        seed = self._options.seed * 1_000_003 + self._num_batches
        return await asyncio.to_thread(self._options.prompts, count, self._tokenizer, seed)
