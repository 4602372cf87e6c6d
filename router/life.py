"""What of a request outlives its attempts: the tokens so far, its place in the line, its deadline, its trail."""

import asyncio
import logging
from enum import Enum

from kvasir.common.errors import NodeUnavailable, Overloaded, ServingError
from kvasir.router.policy import Need
from kvasir.router.queue import Turn
from kvasir.router.types import PositionLogprobs, RoutedRequest, TokenDelta

log = logging.getLogger(__name__)


class Mark(Enum):
    RECEIVED = "received"
    DISPATCHED = "dispatched"  # a decode node with room, and a prefill node, had been found
    FIRST_TOKEN = "first_token"
    DECODE_START = "decode_start"  # the second token: the blocks had come over
    FINISHED = "finished"


class Life:
    """One sequence, from the door to its last token."""

    def __init__(self, request: RoutedRequest, sequence: int, turn: Turn, deadline_s: float, max_failures: int) -> None:
        self.request = request
        self.sequence = sequence
        self.turn = turn
        self.deadline_s = deadline_s  # by the event loop's clock
        self.output_token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.marks: dict[Mark, float] = {}
        self._max_failures = max_failures
        self._num_failures = 0
        self.mark(Mark.RECEIVED)

    @property
    def has_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def remaining_s(self) -> float:
        return self.deadline_s - asyncio.get_running_loop().time()

    def need(self, *, wants_prefill: bool, connector: str | None = None) -> Need:
        return Need(
            num_tokens=self.num_tokens,
            max_num_tokens=len(self.request.prompt_token_ids) + self.request.sampling.max_tokens,
            wants_prefill=wants_prefill,
            connector=connector,
        )

    def take(
        self,
        token_ids: tuple[int, ...],
        finish_reason: str | None,
        logprobs: tuple[PositionLogprobs, ...],
        served_by: str,
        *,
        prompt_logprobs: tuple[PositionLogprobs, ...],
        num_cached_tokens: int,
    ) -> TokenDelta:
        """Book new tokens; what is said once is said with the first."""
        is_first = Mark.FIRST_TOKEN not in self.marks
        self.mark(Mark.FIRST_TOKEN)
        self.output_token_ids.extend(token_ids)
        self.finish_reason = finish_reason
        return TokenDelta(
            sequence=self.sequence,
            token_ids=token_ids,
            finish_reason=finish_reason,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs if is_first else (),
            num_cached_tokens=num_cached_tokens if is_first else None,
            served_by=served_by,
        )

    def note_failure(self, error: ServingError) -> None:
        """A node failed us; raises when that has happened too often. A node that is full has not failed."""
        if isinstance(error, Overloaded):
            return
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            raise NodeUnavailable(f"gave up after {self._num_failures} failures; the last: {error}") from error

    def mark(self, mark: Mark) -> None:
        """The first time counts."""
        self.marks.setdefault(mark, asyncio.get_running_loop().time())

    def between_s(self, start: Mark, end: Mark) -> float | None:
        if start not in self.marks or end not in self.marks:
            return None
        return self.marks[end] - self.marks[start]


def describe(marks: dict[Mark, float]) -> str:
    """{RECEIVED: 1.0, FIRST_TOKEN: 1.25} -> `received=+0.0ms first_token=+250.0ms`"""
    start = marks[Mark.RECEIVED]
    return " ".join(f"{mark.value}=+{(at - start) * 1e3:.1f}ms" for mark, at in marks.items())
