"""Prompts for the built-in model."""

import random

_PLAIN_TOKENS = range(1000, 40_000)


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(_PLAIN_TOKENS, k=num_tokens)
