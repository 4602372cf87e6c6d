"""A peer of `kvasir bench peers` that is an OpenAI endpoint: all prompts of a batch at once, streamed."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kvasir.bench.load_generator import LoadResult, run_load
from kvasir.bench.openai_client import Endpoint, Outcome, ask, first_model
from kvasir.bench.report import refuse_failures
from kvasir.bench.serve import open_session
from kvasir.bench.tokenizer import DirectoryTokenizer
from kvasir.bench.workload import Prompt
from kvasir.cli.model import prepare_builtin_model


def measure_endpoint(url: str, batch: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    """Its prefix cache, if it has one, is to be off: the same prompts come once for a first token, once for all."""
    asyncio.run(_load(url, [prompt[::-1] for prompt in batch], 3))  # whatever is done once is done
    first = asyncio.run(_load(url, batch, 1))
    whole = asyncio.run(_load(url, batch, num_tokens))
    return {
        "concurrency": len(batch),
        "tokens_per_s": len(batch) * num_tokens / whole.duration_s,
        "decode_tokens_per_s": len(batch) * (num_tokens - 1) / (whole.duration_s - first.duration_s),
        "texts": [_whole_characters(outcome.text) for outcome in whole.outcomes],
    }


def texts_of(answers: Sequence[Sequence[int]]) -> list[str]:
    """What an endpoint with the built-in model says for these tokens."""
    if not answers:
        return []
    tokenizer = DirectoryTokenizer(prepare_builtin_model())
    return [_whole_characters(tokenizer.decode(token_ids)) for token_ids in answers]


def _whole_characters(text: str) -> str:
    """A last character of which bytes are missing is shown by some, and by others not."""
    return text.rstrip("\ufffd")


async def _load(url: str, batch: Sequence[Sequence[int]], num_tokens: int) -> LoadResult:
    async with open_session() as session:
        model = await first_model(session, url, {})
        endpoint = Endpoint(base_url=url, model=model, extra_body={"temperature": 0}, ignore_eos=True)

        async def send(prompt: Prompt) -> Outcome:
            return await ask(session, endpoint, prompt)

        prompts = [Prompt(content=tuple(prompt), num_output_tokens=num_tokens) for prompt in batch]
        load = await run_load(prompts, [0.0] * len(prompts), send)
    refuse_failures(load)
    return load
