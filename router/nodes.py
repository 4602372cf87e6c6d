"""What a node says of itself, once (`NodeInfo`) and with every heartbeat (`NodeLoad`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kvasir.common.prefill_speed import PrefillSpeed


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Fixed for as long as the node's process lives."""

    address: str
    role: Role
    epoch: str  # changes when the node restarts
    model_name: str
    kv_identity: bytes  # equal, or two nodes may not pair
    block_size: int
    num_kv_heads: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_total_blocks: int
    connector: str
    kv_endpoint: str  # where receivers fetch from this node; empty for a store
    metrics_address: str
    eos_token_ids: frozenset[int]
    kv_stored_as: str = ""  # a store: the form of this node's blocks; receivers must ask for it

    @property
    def max_tokens_held(self) -> int:
        """The longest request, prompt and outputs together, that fits an empty cache and the model."""
        return min(self.max_model_len, self.num_total_blocks * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    num_running: int
    num_waiting: int
    num_free_blocks: int  # free, or held by the prefix cache alone
    num_queued_tokens: int  # prompt tokens accepted and not computed yet
    num_leased_blocks: int = 0  # computed for others, not fetched yet
    prefill_tokens_per_s: float = 0.0  # measured there; 0: nothing yet
    decode_step_s: float = 0.0
    prefill_speed: PrefillSpeed | None = None
    block_fetch_s: float = 0.0  # for one block to come from elsewhere


def pairing_refusal(newcomer: NodeInfo, members: Iterable[NodeInfo]) -> str:
    """Why KV of the one would be wrong on one of the others; empty if it would not. One of its address is no other."""
    for member in members:
        if member.address == newcomer.address:
            continue
        if newcomer.block_size != member.block_size:  # also part of the identity, but there one could not read it
            return f"{newcomer.address} has block size {newcomer.block_size}, {member.address} has {member.block_size}"
        if newcomer.kv_identity != member.kv_identity:
            return (
                f"{newcomer.address} ({newcomer.model_name}) has KV identity {newcomer.kv_identity.hex()}, "
                f"{member.address} ({member.model_name}) has {member.kv_identity.hex()}"
            )
    return ""
