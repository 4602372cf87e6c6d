"""Tokens that are noted, and what is read of the notes."""

import math

from kvasir.router.openai.stream_notes import deltas_of, line_of
from kvasir.router.types import PositionLogprobs, TokenDelta


def test_tokens_are_read_as_they_were_noted() -> None:
    first = PositionLogprobs(((5, -0.1234567890123456789), (7, -math.inf)), 1)
    deltas = [
        TokenDelta(0, (5,), None, (first,), (PositionLogprobs(((3, -2.5),), 4),), 16, "10.0.0.1:50051"),
        TokenDelta(1, (), None),
        TokenDelta(1, (1, 2, 3), "length", served_by="a\nb"),
    ]
    assert deltas_of(b"".join(map(line_of, deltas))) == deltas
