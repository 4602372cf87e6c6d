"""Out of blocks: who gives way, and how he gets back what he loses. Pure: measured seconds in, a choice out.

    RECOMPUTE   a forward pass over what the prefix cache has lost by then       s of n tokens at their positions
    SWAP        copied to the host now, and back into the cache later            2 x s of a block's copy
    FETCH       fetched again from the store that still has it; what lies        s of a block's fetch,
                behind the stored part is computed                               and of the tokens behind

None of it changes what a request generates, since a token's random number depends on its position alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from kvasir.common.prefill_speed import PrefillSpeed

_MARGIN = 0.5  # another than the last come must be so much cheaper a block: who came early shall not wait for little


class Way(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """As measured on this node. None: not known."""

    prefill: PrefillSpeed | None = None
    copy_s_per_block: float | None = None  # between the cache and the host, one way
    fetch_s_per_block: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one request would give up."""

    num_tokens: int  # computed so far
    num_kept_tokens: int  # of them, from the front: in blocks that others hold too, and that will be found again
    num_stored_tokens: int  # of them, from the front: in a store
    num_own_blocks: int  # that hold computed tokens, and that nobody else holds
    num_freed_blocks: int  # that others could have
    block_size: int


@dataclass(frozen=True, slots=True)
class Choice:
    way: Way
    cost_s: float


def choose_way(loss: Loss, rates: Rates, num_host_blocks: int) -> Choice:
    """The cheapest, if all that it gives up is lost: what of it the prefix cache still has when it comes back, nobody
    knows now. What was never measured is worth trying, so that it is: a copy, then a fetch, before computing.

    num_host_blocks: how many more the host can hold
    """
    can_swap = 0 < loss.num_own_blocks <= num_host_blocks
    can_fetch = loss.num_stored_tokens > loss.num_kept_tokens
    costs = {
        Way.SWAP: _swap_s(loss, rates) if can_swap else inf,
        Way.FETCH: _fetch_s(loss, rates) if can_fetch else inf,
        Way.RECOMPUTE: _compute_s(rates, loss.num_kept_tokens, loss.num_tokens),
    }
    way = min(costs, key=lambda way: costs[way])  # the first of equals
    return Choice(Way.RECOMPUTE, 0.0) if costs[way] == inf else Choice(way, costs[way])


def choose_victim(costs_s: Sequence[float], num_freed_blocks: Sequence[int]) -> int:
    """The index of who gives way, of candidates in the order in which they are served: the last, unless another gives
    its blocks for much less."""
    cheapest = last = len(costs_s) - 1
    prices = [cost_s / max(num_freed, 1e-9) for cost_s, num_freed in zip(costs_s, num_freed_blocks, strict=True)]
    for i in reversed(range(last)):
        if num_freed_blocks[i] and prices[i] < _MARGIN * prices[last] and prices[i] < prices[cheapest]:
            cheapest = i
    return cheapest


def _swap_s(loss: Loss, rates: Rates) -> float:
    return 0.0 if rates.copy_s_per_block is None else 2 * loss.num_own_blocks * rates.copy_s_per_block


def _fetch_s(loss: Loss, rates: Rates) -> float:
    if rates.fetch_s_per_block is None:
        return 0.0
    num_blocks = (loss.num_stored_tokens - loss.num_kept_tokens) // loss.block_size
    return num_blocks * rates.fetch_s_per_block + _compute_s(rates, loss.num_stored_tokens, loss.num_tokens)


def _compute_s(rates: Rates, start: int, end: int) -> float:
    """A node that has never computed a prompt has no reason to begin with this one, if there is another way."""
    if end <= start:
        return 0.0
    return inf if rates.prefill is None else rates.prefill.seconds(start, end)
