"""What of a request outlives its attempts: the tokens so far, its place in the line, its deadline, its trail."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from kvasir.common.errors import NodeUnavailable, Overloaded, ServingError
from kvasir.common.seeds import sequence_seed
from kvasir.router.node_events import Tokens
from kvasir.router.prefix_index import Prefix
from kvasir.router.queue import Turn
from kvasir.router.types import Continued, PositionLogprobs, RoutedRequest, TokenDelta
from kvasir.router.views import Need

log = logging.getLogger(__name__)


class Mark(StrEnum):
    RECEIVED = "received"
    DISPATCHED = "dispatched"  # a decode node with room, and a prefill node, had been found
    FIRST_TOKEN = "first_token"
    DECODE_START = "decode_start"  # the second token: the blocks had come over
    FINISHED = "finished"


class Life:
    """One request, from the door to the last token of its last sequence.

    Its sequences live together until a node is lost when they have begun: they have no longer only the prompt in
    common then, so each goes on by itself, as a request of its own (`parts`).
    """

    __slots__ = (
        "_first_sequence",
        "_has_told",
        "_max_failures",
        "_num_failures",
        "_num_prompt_tokens",
        "deadline_s",
        "marks",
        "open",
        "outcomes",
        "outputs",
        "request",
        "turn",
    )

    def __init__(
        self, request: RoutedRequest, turn: Turn, deadline_s: float, max_failures: int, first_sequence: int = 0
    ) -> None:
        """`first_sequence`: what the client calls the request's sequence 0."""
        self.request = request
        self.turn = turn
        self.deadline_s = deadline_s  # by the event loop's clock
        self.outputs: list[list[int]] = [[] for _ in range(request.num_sequences)]
        self.outcomes: list[str | None] = [None] * request.num_sequences  # a finish reason, or how else it ended
        self.open = set(range(request.num_sequences))
        self.marks: dict[Mark, float] = {}
        self._first_sequence = first_sequence
        self._max_failures = max_failures
        self._num_failures = 0
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._has_told = False  # tokens, since it is here
        self.mark(Mark.RECEIVED)

    @property
    def has_begun(self) -> bool:
        return any(self.outputs)

    @property
    def num_tokens(self) -> int:
        """That a node holds for it: the prompt once, and the outputs of each sequence that goes on."""
        if len(self.outputs) == 1:
            return self._num_prompt_tokens + (len(self.outputs[0]) if self.open else 0)
        return self._num_prompt_tokens + sum(len(self.outputs[sequence]) for sequence in self.open)

    @property
    def remaining_s(self) -> float:
        return self.deadline_s - asyncio.get_running_loop().time()

    def need(self, *, wants_prefill: bool, connector: str | None = None) -> Need:
        return Need(
            num_tokens=self.num_tokens,
            max_num_tokens=len(self.request.prompt_token_ids) + self.request.sampling.max_tokens,
            num_sequences=self.request.num_sequences,
            wants_prefill=wants_prefill,
            crosses_tiers=self.request.crosses_tiers,
            connector=connector,
            prefix=self._prefix(),
        )

    def _prefix(self) -> Prefix | None:
        """None where all of the prompt is to be scored, and so computed."""
        if self.request.sampling.prompt_logprobs is not None and not self.has_begun:
            return None
        token_ids = self.request.prompt_token_ids
        if len(self.outputs) == 1 and self.outputs[0]:
            token_ids = (*token_ids, *self.outputs[0])
        return Prefix(token_ids, self.request.cache_salt)

    def go_on_from(self, continued: Continued) -> None:
        """Of one that begins here, but has begun elsewhere."""
        self.outputs = [list(token_ids) for token_ids in continued.outputs]
        for sequence in continued.ended:
            self.stop(sequence)

    def stop(self, client_sequence: int) -> int | None:
        """End the sequence that the client calls so. None: it is none of these, or has ended."""
        sequence = client_sequence - self._first_sequence
        if sequence not in self.open:
            return None
        self.open.remove(sequence)
        self.outcomes[sequence] = "abort"
        return sequence

    def parts(self) -> list["Life"]:
        """Each sequence that goes on, by itself; none is left here."""
        parts = []
        for sequence in sorted(self.open):
            seed = sequence_seed(self.request.sampling.seed, sequence)
            sampling = replace(self.request.sampling, seed=seed, prompt_logprobs=None)
            request = replace(self.request, num_sequences=1, sampling=sampling)
            part = Life(request, self.turn, self.deadline_s, self._max_failures, self._first_sequence + sequence)
            part.outputs = [self.outputs[sequence]]
            part.marks = dict(self.marks)
            part._num_failures = self._num_failures
            part._has_told = self._has_told
            parts.append(part)
        self.open.clear()
        return parts

    def take(
        self, tokens: Tokens, served_by: str, prompt_logprobs: Sequence[PositionLogprobs], num_cached_tokens: int
    ) -> TokenDelta | None:
        """Book new tokens; what is said once is said with the first. None: their reader has had enough."""
        token_ids, finish_reason, logprobs, sequence = tokens
        if sequence not in self.open:
            return None
        self.outputs[sequence].extend(token_ids)
        if finish_reason is not None:
            self.open.remove(sequence)
            self.outcomes[sequence] = finish_reason
        sequence += self._first_sequence
        if self._has_told:
            return TokenDelta(sequence, token_ids, finish_reason, logprobs, (), None, served_by)
        self._has_told = True
        self.mark(Mark.FIRST_TOKEN)
        prompt = tuple(prompt_logprobs)
        return TokenDelta(sequence, token_ids, finish_reason, logprobs, prompt, num_cached_tokens, served_by)

    def note_failure(self, error: ServingError) -> None:
        """A node failed us; raises when that has happened too often. A node that is full has not failed."""
        if isinstance(error, Overloaded):
            return
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            raise NodeUnavailable(f"gave up after {self._num_failures} failures; the last: {error}") from error

    def mark(self, mark: Mark) -> None:
        """The first time counts."""
        if mark not in self.marks:
            self.marks[mark] = asyncio.get_running_loop().time()

    def between_s(self, start: Mark, end: Mark) -> float | None:
        if start not in self.marks or end not in self.marks:
            return None
        return self.marks[end] - self.marks[start]


def describe(marks: dict[Mark, float]) -> str:
    """{RECEIVED: 1.0, FIRST_TOKEN: 1.25} -> `received=+0.0ms first_token=+250.0ms`"""
    start = marks[Mark.RECEIVED]
    return " ".join(f"{mark.value}=+{(at - start) * 1e3:.1f}ms" for mark, at in marks.items())
