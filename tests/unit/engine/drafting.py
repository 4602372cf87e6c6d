"""Drafts whose fate is known beforehand."""

from collections.abc import Callable, Sequence

from kvasir.engine.request import Request, RequestId
from kvasir.engine.speculation.payoff import Payoff, Track

WRONG = 1  # a token id that hardly ever comes by itself


class Oracle:
    """Knows what comes, and is wrong now and then: at the positions for which `is_wrong` says so."""

    def __init__(
        self, future: Callable[[Request, int], list[int]], is_wrong: Callable[[int], bool] = lambda p: p * 7 % 11 < 3
    ) -> None:
        self._future = future
        self._is_wrong = is_wrong
        self.num_asked = 0

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[RequestId, list[int]]:
        proposed = {}
        for request, most in wanted:
            self.num_asked += 1
            if self.num_asked % 4 == 0:
                continue  # no idea at all
            future = self._future(request, most)
            drafts = [WRONG if self._is_wrong(request.num_tokens + i) else token for i, token in enumerate(future)]
            proposed[request.request_id] = drafts[: 1 + self.num_asked % most]
        return proposed


class Always(Payoff):
    """Drafts as many as there may be."""

    def __init__(self) -> None:
        super().__init__()
        self.costs.wants_plain = lambda num_seqs: False  # type: ignore[method-assign]

    def num_drafts(self, track: Track, num_seqs: int, most: int) -> int:
        return most
