"""The nouns between the two halves of the router: the HTTP half makes `RoutedRequest`s, the dispatching half answers
with `TokenDelta`s. Neither knows anything else of the other."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvasir.common.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to pick the next token: a mirror of the wire's SamplingParams. The defaults switch everything off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0  # always there: the HTTP half draws one where the client gave none
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()  # the end-of-sequence ids included, unless ignore_eos
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Continued:
    """What there is already of an answer that goes on."""

    outputs: tuple[tuple[int, ...], ...]  # token ids, of each sequence
    ended: frozenset[int]  # the sequences of which no more is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """One client request, valid in itself. Stop strings are the HTTP half's business: nodes see token ids only."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    num_sequences: int = 1  # of the one prompt, which is computed once; sequence i has a seed derived from (seed, i)
    cache_salt: str = ""
    priority: int = 0  # lower is served earlier
    deadline_s: float | None = None  # seconds from now for the whole answer
    continued: Continued | None = None  # None: it begins
    crosses_tiers: bool = False  # whatever could be spared: it is to be seen that all tiers work


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Of the raw logits. `entries`: the token itself first, then the best ones, each (token id, logprob)."""

    entries: tuple[tuple[int, float], ...]
    rank: int  # of the token itself; 1 is the best


class TokenDelta(NamedTuple):
    """New tokens of one sequence. The last one of each sequence carries its `finish_reason`.

    `token_ids` includes the end-of-sequence or stop token that ended it; it may be empty in the last delta.
    """

    sequence: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop" | "length"
    logprobs: tuple[PositionLogprobs, ...] = ()  # one a token, where asked for
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # on the first delta, where asked for; from position 1 on
    num_cached_tokens: int | None = None  # on the first delta: prompt tokens that no node had to compute
    served_by: str = ""  # address of the node that sampled these tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """What a request may ask for, given the nodes that are here now."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_prompt_tokens: int  # the longest prompt that some decode node can hold, with room for one more token


class Reader:
    """What whoever reads a generation says back.

    `take`, where it is set, may be given tokens in the very call in which they come, while the reader waits for them.
    It says whether it has taken them; else they come as all others do.
    """

    __slots__ = ("_listeners", "_stopped", "num_tokens_taken", "take")

    def __init__(self) -> None:
        self.take: Callable[[TokenDelta], bool] | None = None
        self.num_tokens_taken = 0
        self._stopped: list[int] = []
        self._listeners: list[Callable[[int], None]] = []

    def stop(self, sequence: int) -> None:
        """It wants no more of one sequence, while others go on. Tokens of it that are on their way may still come."""
        self._stopped.append(sequence)
        for listener in self._listeners:
            listener(sequence)

    def listen(self, listener: Callable[[int], None]) -> None:
        """Of those to come, and of those that have been stopped already."""
        self._listeners.append(listener)
        for sequence in self._stopped:
            listener(sequence)

    def ignore(self, listener: Callable[[int], None]) -> None:
        """One that has listened: it is told no more."""
        self._listeners.remove(listener)


class Backend(Protocol):
    """What endpoints know of the dispatching half; `kvasir.router.dispatch.Dispatcher` is one."""

    def generate(self, request: RoutedRequest, reader: Reader | None = None) -> AsyncGenerator[TokenDelta]:
        """The tokens as they come, of all sequences. `aclose()` cancels everywhere at once.

        Nothing happens before the first `__anext__`. Raises ServingErrors, and only when nothing
        is left that could compute: InvalidRequest, Overloaded (with retry_after_s), NodeUnavailable,
        DeadlineExceeded, NumericalError. None of the tokens yielded before are taken back.
        """
        ...

    def limits(self) -> ClusterLimits:
        """Raises NodeUnavailable while no decode node is here."""
        ...
