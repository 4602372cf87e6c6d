"""How a request wants its tokens picked."""

from dataclasses import dataclass

from kvasir.common.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick the next token. The defaults switch everything off: greedy is temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16  # 0: nothing is generated, the prompt is computed (and scored) only
    stop_token_ids: frozenset[int] = frozenset()  # the end-of-sequence ids included
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # not None: each prompt token but the first is scored
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a finite number > 0, got {self.repetition_penalty}")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {self.max_tokens}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
