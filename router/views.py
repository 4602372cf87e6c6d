"""What a choice is made from: the nodes as they are at one moment, and what a request asks of them."""

from dataclasses import dataclass

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.prefix_index import Prefix

# A prefill node is given work only while less than this many of its chunks wait to be computed, so that a reservation
# on a decode node never waits longer than that for its prompt.
MAX_QUEUED_CHUNKS = 2


@dataclass(slots=True, kw_only=True)  # a value, but freezing would treble what making one costs
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
    prefill_speed: PrefillSpeed | None = None  # None: not measured yet
    decode_step_s: float = 0.0  # 0: not measured yet
    block_fetch_s: float = 0.0  # for one block to come there; 0: not measured yet

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
    crosses_tiers: bool = False  # True: a decode node prefills for itself only where nobody else can
    connector: str | None = None  # set: the decode node must speak it
    prefix: Prefix | None = None  # None: what caches hold of it is of no use to it


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """5 tokens, block_size 4 -> 2"""
    return -(-num_tokens // block_size)
