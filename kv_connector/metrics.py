"""Plain counters of what crossed, and of what did not and why. A node exposes them; nothing here knows how."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class MissReason(Enum):
    """Why a block could not be used. The first group counts frames refused, the second blocks given up."""

    HEADER = "header"  # not a header of ours, or damaged
    IDENTITY = "identity"  # of another model
    LAYOUT = "layout"
    KEY = "key"  # another block than was asked for
    TOKENS = "tokens"  # another number of tokens
    CODEC = "codec"
    EPOCH = "epoch"  # the sender has restarted in between
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"

    ABSENT = "absent"
    TIMEOUT = "timeout"
    PEER_LOST = "peer_lost"
    STORE_DOWN = "store_down"


@dataclass(eq=False, slots=True)
class TransferMetrics:
    """Of one node, both directions. Counts only ever rise."""

    blocks_fetched: int = 0
    bytes_fetched: int = 0
    blocks_sent: int = 0  # handed to the transport, by a peer connector
    bytes_sent: int = 0
    blocks_stored: int = 0
    bytes_stored: int = 0
    blocks_already_stored: int = 0
    retries: int = 0
    store_failures: int = 0
    leases_expired: int = 0  # transfers
    transfers: int = 0
    transfer_s: float = 0.0
    overlapped_s: float = 0.0  # the part of `transfer_s` before the sender had published its last block
    misses: Counter[MissReason] = field(default_factory=Counter)

    def miss(self, reason: MissReason, num_blocks: int = 1) -> None:
        if num_blocks:
            self.misses[reason] += num_blocks

    @property
    def overlapped_share(self) -> float:
        return self.overlapped_s / self.transfer_s if self.transfer_s else 0.0
