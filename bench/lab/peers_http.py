"""A peer of `kvasir bench peers` that is an OpenAI endpoint: all prompts of a batch at once, streamed."""

from collections.abc import Sequence
from typing import Any

from kvasir.bench.lab.greedy_load import as_prompt, greedy_load
from kvasir.bench.load_generator import LoadResult
from kvasir.bench.tokenizer import DirectoryTokenizer
from kvasir.cli.builtin_model import prepare_builtin_model


def measure_endpoint(url: str, batch: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    """Its prefix cache, if it has one, is to be off: the same prompts come once for a first token, once for all."""

    def load(prompts: Sequence[Sequence[int]], num_output_tokens: int) -> LoadResult:
        return greedy_load(url, [as_prompt(prompt, num_output_tokens) for prompt in prompts])

    load([prompt[::-1] for prompt in batch], 3)  # whatever is done once is done
    first, whole = load(batch, 1), load(batch, num_tokens)
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
