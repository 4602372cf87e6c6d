"""Plain counters: which blocks were transferred, which were not, and why. The node exports them."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class MissReason(Enum):
    """Why a block could not be used. The first group counts refused frames, the second blocks that were given up."""

    HEADER = "header"  # foreign or damaged
    IDENTITY = "identity"  # another model's
    LAYOUT = "layout"
    KEY = "key"  # another block than was asked for
    TOKENS = "tokens"  # another number of tokens
    CODEC = "codec"
    EPOCH = "epoch"  # the sender has restarted during the transfer
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"

    ABSENT = "absent"
    TIMEOUT = "timeout"
    SLOW = "slow"  # computing was faster
    PEER_LOST = "peer_lost"
    VERSION = "version"  # the peer speaks another version of the connector's protocol
    STORE_DOWN = "store_down"


@dataclass(eq=False, slots=True)
class TransferMetrics:
    """One node's counters, both directions. They only rise. Bytes count what travels, after the codec."""

    # In: from peers and stores.
    transfers: int = 0
    blocks_fetched: int = 0
    bytes_fetched: int = 0
    transfer_s: float = 0.0
    overlapped_s: float = 0.0  # the part of `transfer_s` before the sender had published its last block
    blocks_inexact: int = 0  # of those fetched: from another dtype or a lossy codec, so not cached
    retries: int = 0
    declined: int = 0  # transfers given up, from the start or midway, because computing was faster
    misses: Counter[MissReason] = field(default_factory=Counter)

    # Out: lent to a peer's transport.
    blocks_sent: int = 0
    bytes_sent: int = 0
    send_s: float = 0.0  # time in which a transport held any block
    leases_expired: int = 0  # transfers

    # Out: written to a store.
    blocks_stored: int = 0
    bytes_stored: int = 0
    store_s: float = 0.0
    blocks_already_stored: int = 0
    blocks_not_stored: int = 0  # given up: the store failed, time ran out, or too many were waiting

    failures: Counter[str] = field(default_factory=Counter)  # of calls to the store, by direction: reading, writing

    def miss(self, reason: MissReason, num_blocks: int = 1) -> None:
        if num_blocks:
            self.misses[reason] += num_blocks

    def stored(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self.blocks_stored += num_blocks
        self.bytes_stored += num_bytes
        self.store_s += seconds

    @property
    def store_failures(self) -> int:
        return self.failures.total()
