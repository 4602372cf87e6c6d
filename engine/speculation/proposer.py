"""Where drafts come from."""

from collections.abc import Sequence
from typing import Protocol

from kvasir.engine.request import Request, RequestId


class Proposer(Protocol):
    """A guess costs time when it is wrong, and nothing else: every token is verified."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[RequestId, list[int]]:
        """For each request at most so many tokens that may follow its own; those without a guess are left out."""
        ...
