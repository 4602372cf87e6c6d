"""The prompts of a benchmark, and when each is sent. Pure: the same seed gives the same load."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_LOREM = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore "
    "magna aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea commodo consequat"
)
LOREM = tuple(_LOREM.split())
_MAX_FITTING_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request of the load."""

    content: str | tuple[int, ...]  # text, or token ids
    num_output_tokens: int
    num_tokens: int | None = None  # None: only the server can tell


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    @property
    def plain_ids(self) -> Sequence[int]:
        """The ids of ordinary tokens: no special ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Lengths are uniform in [n * (1 - range_ratio), n * (1 + range_ratio)]."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0  # tokens that all prompts share, before the random ones

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"the range ratio must be in [0, 1), got {self.range_ratio}")
        if self.input_len < 1 or self.output_len < 1 or self.prefix_len < 0:
            raise ValueError("input and output lengths must be at least 1, the prefix at least 0")

    def draw(self, length: int, rng: random.Random) -> int:
        low = math.floor(length * (1 - self.range_ratio))
        return max(1, rng.randint(low, math.ceil(length * (1 + self.range_ratio))))


def random_prompts(
    num_prompts: int, lengths: RandomLengths, seed: int, tokenizer: Tokenizer | None = None, as_ids: bool = False
) -> list[Prompt]:
    """Without a tokenizer, `lengths` counts words of lorem ipsum."""
    rng = random.Random(seed)
    if tokenizer is None:
        prefix_words = rng.choices(LOREM, k=lengths.prefix_len)
        return [_lorem_prompt(prefix_words, lengths, rng) for _ in range(num_prompts)]
    prefix = rng.choices(tokenizer.plain_ids, k=lengths.prefix_len)
    return [_token_prompt(prefix, lengths, rng, tokenizer, as_ids) for _ in range(num_prompts)]


def _lorem_prompt(prefix: list[str], lengths: RandomLengths, rng: random.Random) -> Prompt:
    words = rng.choices(LOREM, k=lengths.draw(lengths.input_len, rng))
    return Prompt(content=" ".join(prefix + words), num_output_tokens=lengths.draw(lengths.output_len, rng))


def _token_prompt(
    prefix: list[int], lengths: RandomLengths, rng: random.Random, tokenizer: Tokenizer, as_ids: bool
) -> Prompt:
    token_ids = prefix + rng.choices(tokenizer.plain_ids, k=lengths.draw(lengths.input_len, rng))
    num_output_tokens = lengths.draw(lengths.output_len, rng)
    if as_ids:
        return Prompt(content=tuple(token_ids), num_output_tokens=num_output_tokens, num_tokens=len(token_ids))
    text, num_tokens = fit_text(token_ids, tokenizer, rng)
    return Prompt(content=text, num_output_tokens=num_output_tokens, num_tokens=num_tokens)


def fit_text(token_ids: list[int], tokenizer: Tokenizer, rng: random.Random) -> tuple[str, int]:
    """A text that tokenizes to as many tokens; and to how many it does.

    Random tokens, written out and read again, merge and split, so their number must be mended a few times.
    """
    wanted = len(token_ids)
    for _ in range(_MAX_FITTING_ROUNDS):
        text = tokenizer.decode(token_ids)
        token_ids = tokenizer.encode(text)
        if len(token_ids) == wanted:
            break
        token_ids = token_ids[:wanted] + rng.choices(tokenizer.plain_ids, k=max(0, wanted - len(token_ids)))
    else:
        text = tokenizer.decode(token_ids)
    return text, len(tokenizer.encode(text))


def custom_prompts(path: Path, num_prompts: int, default_output_len: int) -> list[Prompt]:
    """Lines `{"prompt": text or ids, "output_tokens": n}`, from the top again if there are too few."""
    prompts = [
        _custom_prompt(line, f"{path}:{number}", default_output_len)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return list(itertools.islice(itertools.cycle(prompts), num_prompts))


def _custom_prompt(line: str, where: str, default_output_len: int) -> Prompt:
    try:
        entry = json.loads(line)
        prompt = entry["prompt"]
        num_output_tokens = int(entry.get("output_tokens", default_output_len))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{where} is no JSON object with a "prompt": {error}') from error
    if isinstance(prompt, str):
        return Prompt(content=prompt, num_output_tokens=num_output_tokens)
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return Prompt(content=tuple(prompt), num_output_tokens=num_output_tokens, num_tokens=len(prompt))
    raise ValueError(f'{where}: "prompt" must be a text or a list of token ids')


def arrival_times_s(num_requests: int, request_rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which each request is sent.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even. They are stretched so that the last request is sent at num_requests / request_rate.
    """
    if request_rate <= 0 or burstiness <= 0:
        raise ValueError(f"request rate and burstiness must be positive, got {request_rate} and {burstiness}")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    gaps = [rng.gammavariate(burstiness, 1 / burstiness) for _ in range(num_requests)]
    scale = num_requests / request_rate / sum(gaps)
    return [arrival * scale for arrival in itertools.accumulate(gaps)]
