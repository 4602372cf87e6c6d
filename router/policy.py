"""Which node takes a request: pure functions of a snapshot.

A policy takes the nodes that have room, the address that it chose last and what each of them costs, and returns one of
the nodes. `choose` is the rule around it: what room means, and whether a prefill node is worth the trip.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from kvasir.router.costs import Cached, LocalPrefill, Speeds, decode_s, fastest, local_s, prefill_s, trip_s
from kvasir.router.views import MAX_QUEUED_CHUNKS, Need, NodeView, num_blocks_for

_ALIKE = 1.25  # costs within this factor are the same: that is how well speeds are known


@dataclass(frozen=True, slots=True)
class Choice:
    """`prefill` None: the decode node prefills for itself, or somebody has done it."""

    decode: NodeView
    prefill: NodeView | None
    why_local: str = ""  # where a decode node prefills: "cached", "short", or "alone", since nobody else can


Cost = Callable[[NodeView], float]
Policy = Callable[[Sequence[NodeView], str, Cost], NodeView]


def _free(node: NodeView) -> float:
    return 0.0


def round_robin(nodes: Sequence[NodeView], last: str, cost: Cost = _free) -> NodeView:
    """In the order of the addresses, going round after the last: a,b,c and last b -> c"""
    return min(nodes, key=lambda node: (node.address <= last, node.address))


def least_loaded(nodes: Sequence[NodeView], last: str, cost: Cost = _free) -> NodeView:
    """The lowest pressure; among equals, by turns."""
    pressures = [node.pressure for node in nodes]
    lowest = min(pressures)
    return round_robin([node for node, own in zip(nodes, pressures, strict=True) if own == lowest], last)


def prefix_aware(nodes: Sequence[NodeView], last: str, cost: Cost = _free) -> NodeView:
    """The cheapest: whoever holds the prompt, until what waits there costs more than computing it elsewhere. Among
    those that cost about the same, the least loaded."""
    costs = [cost(node) for node in nodes]
    most = _ALIKE * min(costs)
    return least_loaded([node for node, own in zip(nodes, costs, strict=True) if own <= most], last)


POLICIES: dict[str, Policy] = {
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}


@dataclass(frozen=True, slots=True)
class Rules:
    """By which all choices of a router are made."""

    policy: Policy
    local_prefill: LocalPrefill


def _nothing(address: str) -> int:
    return 0


def choose(
    need: Need,
    prefill: Sequence[NodeView],
    decode: Sequence[NodeView],
    rules: Rules,
    cached: Cached = _nothing,
    last_prefill: str = "",
    last_decode: str = "",
) -> Choice | None:
    """A pair that has room for it now; None: let it wait. `cached`: of its tokens, those held by the node there.

    Where the prefill nodes of the best decode node's connector are busy, one of another connector may have its turn.
    """
    able = [node for node in decode if has_room_to_decode(node, need)]
    if not able:
        return None
    best = fastest((*prefill, *decode))
    senders = [node for node in prefill if can_prefill(node, need)]
    connectors = {node.connector for node in senders}

    def cost(node: NodeView) -> float:
        is_alone = need.wants_prefill and node.connector not in connectors
        return decode_s(node, need, cached(node.address), best, is_alone=is_alone)

    while able:
        decoder = rules.policy(able, last_decode, cost)
        own = [node for node in senders if node.connector == decoder.connector]
        choice = _with(decoder, own, need, rules, cached, best, last_prefill)
        if choice is not None:
            return choice
        able = [node for node in able if node.connector != decoder.connector]
    return None


def _with(
    decoder: NodeView,
    senders: Sequence[NodeView],
    need: Need,
    rules: Rules,
    cached: Cached,
    best: Speeds,
    last_prefill: str,
) -> Choice | None:
    """Who prefills for this decode node; None: whoever could is busy."""
    if not need.wants_prefill:
        return Choice(decoder, None)
    if not senders:
        return Choice(decoder, None, "alone")
    idle = [node for node in senders if has_room_to_prefill(node)]
    remote_s = {node.address: prefill_s(node, need, cached(node.address), best) for node in idle}
    num_cached = cached(decoder.address)
    why_local = "" if need.crosses_tiers else rules.local_prefill.reason(need, num_cached)
    if why_local:
        there_s = trip_s(decoder, need, num_cached, min(remote_s.values(), default=inf), best)
        if local_s(decoder, need, num_cached, best) <= there_s:
            return Choice(decoder, None, why_local)
    if not idle:
        return None
    return Choice(decoder, rules.policy(idle, last_prefill, lambda node: remote_s[node.address]))


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
