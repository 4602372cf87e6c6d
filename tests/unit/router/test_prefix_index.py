"""What the router knows of its nodes' caches: never more than they have told, and nothing that it may have missed."""

from collections.abc import Sequence

import pytest

from kvasir.common import hashing
from kvasir.common.hashing import block_hashes, root_hash, routing_key
from kvasir.router import prefix_index
from kvasir.router.prefix_index import HeldBlocks, KVEvents, Prefix

IDENTITY = b"model-a"
BLOCK_SIZE = 16
TOKENS = tuple(range(100))  # six full blocks


def keys_of(token_ids: Sequence[int], salt: str = "", identity: bytes = IDENTITY) -> list[int]:
    return [routing_key(one) for one in block_hashes(root_hash(identity, salt), token_ids, BLOCK_SIZE)]


class Listener:
    """What one node is known to hold, and how often it was asked for all of it."""

    def __init__(self, max_blocks: int = 1000) -> None:
        self.num_asked = 0
        self.held = HeldBlocks(IDENTITY, BLOCK_SIZE, max_blocks, self._ask)

    def _ask(self) -> None:
        self.num_asked += 1

    def hear(self, sequence: int, stored: Sequence[int], dropped: Sequence[int] = (), *, snapshot: bool = False) -> int:
        self.held.apply(KVEvents(sequence, stored, dropped, snapshot))
        return len(self.held)

    def num_cached(self, token_ids: Sequence[int] = TOKENS, salt: str = "") -> int:
        return self.held.num_cached_tokens(Prefix(token_ids, salt))


def test_a_prefix_is_held_up_to_the_first_block_that_is_not() -> None:
    node, keys = Listener(), keys_of(TOKENS)
    assert node.num_cached() == 0
    node.hear(1, [keys[0], keys[1], keys[3]])
    assert node.num_cached() == 32
    node.hear(2, [keys[2]], [keys[1]])
    assert node.num_cached() == 16
    node.hear(3, [keys[1]])
    assert node.num_cached() == 64
    assert node.num_cached((*TOKENS[:40], 7, *TOKENS[41:])) == 32
    assert node.num_cached(salt="another tenant's") == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_cached"), [(0, 0), (1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (97, 96)]
)
def test_the_last_token_is_never_cached(num_tokens: int, num_cached: int) -> None:
    node = Listener()
    node.hear(1, keys_of(TOKENS))
    assert node.num_cached(TOKENS[:num_tokens]) == num_cached


def test_nodes_whose_hashes_have_another_root_are_looked_up_by_theirs() -> None:
    prefix = Prefix(TOKENS)
    ours, theirs = Listener().held, HeldBlocks(b"model-b", BLOCK_SIZE, 1000)
    events = KVEvents(1, keys_of(TOKENS, identity=b"model-b"))
    ours.apply(events)
    theirs.apply(events)
    assert (ours.num_cached_tokens(prefix), theirs.num_cached_tokens(prefix)) == (0, 96)


def test_after_a_gap_nothing_is_known_before_the_snapshot_has_come() -> None:
    node, keys = Listener(), keys_of(TOKENS)
    node.hear(1, keys[:2])
    assert node.hear(3, keys[2:4]) == 0, "message 2 may have dropped any of them"
    assert node.hear(4, keys[4:]) == 0
    assert node.num_asked == 1
    assert node.hear(5, keys[:1], snapshot=True) == 1
    assert node.hear(6, keys[1:]) == 6
    assert node.num_asked == 1


def test_a_snapshot_that_comes_unasked_replaces_what_was_known() -> None:
    node, keys = Listener(), keys_of(TOKENS)
    node.hear(1, keys[3:], snapshot=True)
    assert node.hear(2, keys[:2], snapshot=True) == 2
    assert node.num_asked == 0


def test_who_says_to_hold_more_than_it_has_is_not_believed_and_not_asked_again_and_again() -> None:
    node = Listener(max_blocks=10)
    assert node.hear(1, range(10)) == 10
    for sequence in range(2, 50):
        assert node.hear(sequence, range(100 * sequence, 100 * sequence + 50)) == 0
    assert node.num_asked == 0
    assert node.hear(50, range(50), snapshot=True) == 0
    assert node.hear(51, range(10), snapshot=True) == 10


def test_no_more_is_hashed_than_somebody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counted(block_hash: hashing.BlockHash) -> int:
        nonlocal num_hashed
        num_hashed += 1
        return routing_key(block_hash)

    monkeypatch.setattr(prefix_index, "routing_key", counted)
    empty, some, other = Listener(), Listener(), Listener()
    keys = keys_of(TOKENS)
    some.hear(1, keys[:3])
    other.hear(1, [1])
    prefix = Prefix(TOKENS)
    assert empty.held.num_cached_tokens(prefix) == 0
    assert num_hashed == 0
    assert other.held.num_cached_tokens(prefix) == 0
    assert num_hashed == 1
    for _ in range(3):
        assert some.held.num_cached_tokens(prefix) == 48
    assert num_hashed == 4
    assert some.held.num_cached_tokens(Prefix(TOKENS[:16])) == 0
    assert num_hashed == 4, "a prompt of one block has nothing that could be cached"
