"""What a choice costs, in one currency: seconds until the first token, and those that others wait for theirs.

    prefill node   what is queued there + what it does not hold of the prompt, at the pace measured there
    decode node    the blocks that it lacks, at the pace at which blocks come to it
                   + one of its steps for each request there: so much it shares with every one

Where a pace has not been measured, that of the others is taken; where none has, a token counts as a second, so that
tokens are compared. Pure: functions of a snapshot.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.views import Need, NodeView, num_blocks_for

Cached = Callable[[str], int]  # address -> tokens at the front of the prompt that are held there

_UNKNOWN = PrefillSpeed(token_s=1.0)


class Speeds(NamedTuple):
    """What to reckon with for nodes that have measured nothing."""

    prefill: PrefillSpeed
    block_fetch_s: float


def typical_speeds(nodes: Iterable[NodeView]) -> Speeds:
    """The mean of those measured. A block whose way nobody knows comes no faster than it is computed."""
    nodes = list(nodes)
    speeds = [node.prefill_speed for node in nodes if node.prefill_speed is not None]
    fetches = [node.block_fetch_s for node in nodes if node.block_fetch_s]
    prefill = _UNKNOWN
    if speeds:
        prefill = PrefillSpeed(_mean(one.token_s for one in speeds), _mean(one.position_s for one in speeds))
    block_size = nodes[0].block_size if nodes else 0
    return Speeds(prefill, _mean(fetches) if fetches else prefill.token_s * block_size)


def prefill_s(node: NodeView, need: Need, num_cached_tokens: int, typical: Speeds) -> float:
    """Until the prompt's last token is computed there."""
    speed = node.prefill_speed or typical.prefill
    return node.num_queued_tokens * speed.token_s + speed.seconds(num_cached_tokens, need.num_tokens)


def decode_s(node: NodeView, need: Need, num_cached_tokens: int, typical: Speeds) -> float:
    num_missing = num_blocks_for(need.num_tokens, node.block_size) - num_cached_tokens // node.block_size
    return transfer_s(node, num_missing, typical) + node.decode_step_s * node.num_seats_taken


def transfer_s(node: NodeView, num_blocks: int, typical: Speeds) -> float:
    return num_blocks * (node.block_fetch_s or typical.block_fetch_s)


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """When a decode node may prefill for itself though a prefill node could do it.

    However few they are, tokens are computed there only if that costs less than the trip.
    """

    max_uncached_tokens: int = 64  # of a prompt that it holds the greater part of
    max_prompt_tokens: int = 0  # whatever it holds of it

    def reason(self, need: Need, num_cached_tokens: int) -> str:
        """Empty: it may not."""
        num_uncached_tokens = need.num_tokens - num_cached_tokens
        if num_uncached_tokens <= min(self.max_uncached_tokens, num_cached_tokens):
            return "cached"
        return "short" if need.num_tokens <= self.max_prompt_tokens else ""


def local_s(decoder: NodeView, need: Need, num_cached_tokens: int, typical: Speeds) -> float:
    """Of prefilling on the decode node: all that run there wait as well."""
    return prefill_s(decoder, need, num_cached_tokens, typical) * (1 + decoder.num_seats_taken)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
