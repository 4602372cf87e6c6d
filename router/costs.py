"""What a choice costs, in one currency: seconds until the first token, and those that others wait for theirs.

    prefill node   what is queued there + what it does not hold of the prompt, at the pace measured there
    decode node    the blocks that it lacks, at the pace at which blocks come to it; where no prefill node could compute
                   the prompt, the same as on one
                   + one of its steps for each request there: so much it shares with every one

Nodes are taken to be as fast as the fastest, unless they have measured that they are more than twice as slow: less is
what a busy machine makes of equals. Where nothing has been measured, a token counts as a second, so that tokens are
compared. Pure: functions of a snapshot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvasir.common.prefill_speed import PrefillSpeed
from kvasir.router.views import Need, NodeView, num_blocks_for

Cached = Callable[[str], int]  # address -> tokens at the front of the prompt that are held there

_UNKNOWN = PrefillSpeed(token_s=1.0)
_EQUALS = 2.0  # who is up to so many times slower is not
_SOME_TOKENS = 1024  # of a prompt by which speeds are compared


class Speeds(NamedTuple):
    """The fastest that nodes have measured."""

    prefill: PrefillSpeed
    block_fetch_s: float
    step_s: float  # that computes hardly anything; 0: not measured


def fastest(nodes: Sequence[NodeView]) -> Speeds:
    """A block whose way nobody knows comes as fast as it is computed."""
    speeds = [node.prefill_speed for node in nodes if node.prefill_speed is not None]
    fetches = [node.block_fetch_s for node in nodes if node.block_fetch_s]
    prefill = min(speeds, key=lambda speed: speed.seconds(0, _SOME_TOKENS), default=_UNKNOWN)
    fetch_s = min(fetches, default=prefill.token_s * nodes[0].block_size)
    return Speeds(prefill, fetch_s, min((node.decode_step_s for node in nodes if node.decode_step_s), default=0.0))


def prefill_s(node: NodeView, need: Need, num_cached_tokens: int, best: Speeds) -> float:
    """Until the prompt's last token is computed there."""
    speed = _speed(node, best)
    return node.num_queued_tokens * speed.token_s + speed.seconds(num_cached_tokens, need.num_tokens)


def _speed(node: NodeView, best: Speeds) -> PrefillSpeed:
    own = node.prefill_speed
    if own is None:
        return best.prefill
    is_slow = own.seconds(0, _SOME_TOKENS) > _EQUALS * best.prefill.seconds(0, _SOME_TOKENS)
    return own if is_slow else best.prefill


def decode_s(node: NodeView, need: Need, num_cached_tokens: int, best: Speeds, *, is_alone: bool = False) -> float:
    """`is_alone`: it will have to compute the prompt itself."""
    prompt_s = (prefill_s if is_alone else transfer_s)(node, need, num_cached_tokens, best)
    return prompt_s + (node.decode_step_s or best.step_s) * node.num_seats_taken


def transfer_s(node: NodeView, need: Need, num_cached_tokens: int, best: Speeds) -> float:
    num_missing = num_blocks_for(need.num_tokens, node.block_size) - num_cached_tokens // node.block_size
    is_slow = node.block_fetch_s > _EQUALS * best.block_fetch_s
    return num_missing * (node.block_fetch_s if is_slow else best.block_fetch_s)


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


def local_s(decoder: NodeView, need: Need, num_cached_tokens: int, best: Speeds) -> float:
    """Of prefilling on the decode node: one step at least, and all that run there wait as long as its tokens take."""
    own_s = prefill_s(decoder, need, num_cached_tokens, best)
    tokens_s = _speed(decoder, best).seconds(num_cached_tokens, need.num_tokens)
    return max(own_s, best.step_s) + tokens_s * decoder.num_seats_taken


def trip_s(decoder: NodeView, need: Need, num_cached_tokens: int, prefill_s: float, best: Speeds) -> float:
    """Of prefilling elsewhere, which takes a step at least, and then fetching what the decode node lacks."""
    return max(prefill_s, best.step_s) + transfer_s(decoder, need, num_cached_tokens, best)
