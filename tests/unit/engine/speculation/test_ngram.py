import random

import numpy as np
import pytest

from kvasir.engine.request import Phase, Request, RequestId
from kvasir.engine.speculation.ngram import NgramProposer, continuation


def of(tokens: list[int], lookup_min: int = 1, lookup_max: int = 3, most: int = 3) -> list[int]:
    return continuation(np.array(tokens, np.int32), lookup_min, lookup_max, most)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7, 1, 2, 8, 9, 1, 2], [8, 9, 1]),
        ([1, 2, 8, 9, 0, 3, 2, 5, 6, 1, 2], [8, 9, 0]),  # two tokens in common are better than one
        ([2, 5, 5, 5, 2, 6, 6, 6, 2], [6, 6, 6]),  # of equals, the latest
        ([1, 2, 3, 4], []),
        ([1], []),
        ([4, 4], [4, 4, 4]),
        ([0, 1, 2, 1, 2], [1, 2, 1]),  # where the copy reaches the end, it goes on with itself
        ([0, 1, 2, 3, 1], [2, 3, 1]),
    ],
)
def test_what_followed_the_last_time(tokens: list[int], expected: list[int]) -> None:
    assert of(tokens) == expected


def test_too_little_in_common_is_nothing() -> None:
    assert of([1, 2, 8, 3, 2], lookup_min=2) == []
    assert of([1, 2, 8, 1, 2], lookup_min=2) == [8, 1, 2]
    assert of([1, 2, 8, 1, 2], lookup_min=3) == []


def brute_force(tokens: list[int], lookup_min: int, lookup_max: int, most: int) -> list[int]:
    for length in range(lookup_max, lookup_min - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                copied: list[int] = []
                while len(copied) < most:
                    copied.append((tokens + copied)[end + len(copied)])
                return copied
    return []


def test_equal_to_a_plain_search() -> None:
    rng = random.Random(3)
    for _ in range(500):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        lookup_min = rng.randint(1, 4)
        lookup_max, most = rng.randint(lookup_min, 5), rng.randint(1, 8)
        assert of(tokens, lookup_min, lookup_max, most) == brute_force(tokens, lookup_min, lookup_max, most), tokens


def test_it_follows_a_request_as_it_grows_and_forgets_it_at_its_end() -> None:
    proposer = NgramProposer(1, 3)
    one = Request(request_id=RequestId("r"), prompt_token_ids=[5, 6, 7])
    assert proposer.propose([(one, 2)]) == {}
    for _ in range(3):
        one.output_token_ids += [5, 6]
        assert proposer.propose([(one, 2)]) == {"r": of([*one.token_ids], most=2)}
    one.phase = Phase.FINISHED
    other = Request(request_id=RequestId("s"), prompt_token_ids=[1])
    assert proposer.propose([(other, 2)]) == {}
    assert list(proposer._histories) == ["s"]
    again = Request(request_id=RequestId("r"), prompt_token_ids=[1, 2, 1])
    assert proposer.propose([(again, 2)]) == {"r": [2, 1]}
    twin = Request(request_id=RequestId("r"), prompt_token_ids=[3, 3])
    assert proposer.propose([(twin, 2)]) == {"r": [3, 3]}, "another request of the same name"
