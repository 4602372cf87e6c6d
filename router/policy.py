"""Which node takes a request: pure functions of a snapshot.

A policy takes the nodes that have room and the address that it chose last, and returns one of the nodes. `choose` is
the rule around it: what room means, and whether a prefill node is worth the trip.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A prefill node is given work only while less than this many of its chunks wait to be computed, so that a reservation
# on a decode node never waits longer than that for its prompt.
MAX_QUEUED_CHUNKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node at one moment, as far as the router knows."""

    address: str
    connector: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_total_blocks: int
    max_tokens_held: int
    num_free_blocks: int
    num_seats_taken: int
    num_queued_tokens: int
    is_draining: bool = False  # nothing new is sent there
    is_full: bool = False  # it has said no, and not reported its load since

    @property
    def pressure(self) -> float:
        """The share in use of whatever is scarcest here: seats, blocks, or the prefill queue."""
        seats = self.num_seats_taken / self.max_num_seqs
        blocks = 1 - self.num_free_blocks / self.num_total_blocks
        queue = self.num_queued_tokens / (MAX_QUEUED_CHUNKS * self.max_num_batched_tokens)
        return max(seats, blocks, queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a request asks of a pair of nodes."""

    num_tokens: int  # known now: prompt and outputs so far
    max_num_tokens: int  # at most, when it has ended; of its longest sequence
    num_sequences: int = 1
    wants_prefill: bool = True  # False: a prefill node is at it already, or has been
    connector: str | None = None  # set: the decode node must speak it


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` None: the decode node prefills for itself, or somebody has done it."""

    decode: NodeView
    prefill: NodeView | None


Policy = Callable[[Sequence[NodeView], str], NodeView]


def round_robin(nodes: Sequence[NodeView], last: str) -> NodeView:
    """In the order of the addresses, going round after the last: a,b,c and last b -> c"""
    return min(nodes, key=lambda node: (node.address <= last, node.address))


def least_loaded(nodes: Sequence[NodeView], last: str) -> NodeView:
    """The lowest pressure; among equals, by turns."""
    lowest = min(node.pressure for node in nodes)
    return round_robin([node for node in nodes if node.pressure == lowest], last)


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_loaded": least_loaded}


def choose(
    need: Need,
    prefill: Sequence[NodeView],
    decode: Sequence[NodeView],
    policy: Policy,
    last_prefill: str = "",
    last_decode: str = "",
) -> Choice | None:
    """A pair that has room for it now; None: let it wait."""
    able = [node for node in decode if has_room_to_decode(node, need)]
    if not able:
        return None
    decoder = policy(able, last_decode)
    senders = [node for node in prefill if can_prefill(node, need) and node.connector == decoder.connector]
    if not need.wants_prefill or not is_prefill_worthwhile(senders):
        return Choice(decoder, None)
    senders = [node for node in senders if has_room_to_prefill(node)]
    return Choice(decoder, policy(senders, last_prefill)) if senders else None


def can_ever_decode(node: NodeView, need: Need) -> bool:
    speaks = need.connector is None or need.connector == node.connector
    return speaks and not node.is_draining and node.max_tokens_held >= need.max_num_tokens


def has_room_to_decode(node: NodeView, need: Need) -> bool:
    """Of sequences, each has a seat and a last block of its own; more than the whole node has take turns there."""
    num_blocks = num_blocks_for(need.num_tokens + 1, node.block_size) + need.num_sequences - 1
    num_seats = min(need.num_sequences, node.max_num_seqs)
    return (
        can_ever_decode(node, need)
        and not node.is_full
        and node.num_seats_taken + num_seats <= node.max_num_seqs
        and node.num_free_blocks >= min(num_blocks, node.num_total_blocks)
    )


def can_prefill(node: NodeView, need: Need) -> bool:
    return not node.is_draining and node.max_tokens_held > need.num_tokens


def has_room_to_prefill(node: NodeView) -> bool:
    has_seat = node.num_seats_taken < node.max_num_seqs
    return not node.is_full and has_seat and node.num_queued_tokens < MAX_QUEUED_CHUNKS * node.max_num_batched_tokens


def is_prefill_worthwhile(senders: Sequence[NodeView]) -> bool:
    """Always, if there is anybody: an exact cost would weigh queue, uncached prefill and transfer."""
    return bool(senders)


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """5 tokens, block_size 4 -> 2"""
    return -(-num_tokens // block_size)
