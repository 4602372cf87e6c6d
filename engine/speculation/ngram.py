"""Prompt lookup: what followed the last time that the newest tokens were seen in this very request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir.engine.request import Phase, Request, RequestId

# Shapes: T tokens of one request

Tokens = NDArray[np.int32]


class NgramProposer:
    """Needs no model. Good where the answer repeats the prompt, or itself: summaries, code, extraction, loops."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._lookup_min = lookup_min
        self._lookup_max = lookup_max
        self._histories: dict[RequestId, _History] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[RequestId, list[int]]:
        for ended in [key for key, one in self._histories.items() if one.request.phase is Phase.FINISHED]:
            del self._histories[ended]
        proposed = {}
        for request, most in wanted:
            tokens = continuation(self._history(request).tokens(), self._lookup_min, self._lookup_max, most)
            if tokens:
                proposed[request.request_id] = tokens
        return proposed

    def _history(self, request: Request) -> "_History":
        history = self._histories.get(request.request_id)
        if history is None or history.request is not request:
            history = self._histories[request.request_id] = _History(request)
        return history


@dataclass(eq=False, slots=True)
class _History:
    """A request's tokens as an array that grows with them."""

    request: Request
    _buffer: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    _num_tokens: int = 0

    def tokens(self) -> Tokens:
        request, known = self.request, self._num_tokens
        border, num_tokens = len(request.prompt_token_ids), request.num_tokens
        if num_tokens > len(self._buffer):
            grown = np.empty(2 * num_tokens, np.int32)
            grown[:known] = self._buffer[:known]
            self._buffer = grown
        if known < border:
            self._buffer[known:border] = request.prompt_token_ids[known:]
            known = border
        self._buffer[known:num_tokens] = request.output_token_ids[known - border :]
        self._num_tokens = num_tokens
        return self._buffer[:num_tokens]


def continuation(tokens: Tokens, lookup_min: int, lookup_max: int, most: int) -> list[int]:
    """tokens [T] -> `most` tokens, or none: those behind the latest earlier place that ends as all of them end.

    The place with the longest common ending wins, up to `lookup_max` tokens; with less than `lookup_min` it is none.
    Where the copy reaches the end of the tokens it goes on with itself: a loop continues for ever.
    """
    num_tokens, source = len(tokens), 0
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # [earlier places], ascending; their endings are before these
    for length in range(1, min(lookup_max, num_tokens - 1) + 1):
        if length > 1:
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == tokens[num_tokens - length]]
        if not len(ends):
            break
        if length >= lookup_min:
            source = int(ends[-1])
    if not source:
        return []
    copied: list[int] = tokens[source : source + most].tolist()
    while len(copied) < most:
        copied.append(copied[source - num_tokens])
    return copied
