"""The nodes that are here now, and what is known of the room they have.

A node reports its load twice a second; in between the router counts what it has sent there itself. For seats and
queued tokens, which the router knows exactly of its own requests, a report only tells what *others* (another router)
have there. Blocks may be shared between requests, so there the report is the truth, and the router's own estimate
adds what changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from kvasir.common.errors import NodeUnavailable
from kvasir.router.costs import Cached
from kvasir.router.nodes import NodeInfo, NodeLoad, Role, pairing_refusal
from kvasir.router.policy import can_prefill
from kvasir.router.prefix_index import HeldBlocks, Prefix
from kvasir.router.session import NodeSession
from kvasir.router.views import Need, NodeView, num_blocks_for


class Reservation:
    """What one request takes on one node. Given back exactly once, by `release`; nothing counts after that."""

    __slots__ = (
        "_block_size",
        "is_admitted",
        "node",
        "num_blocks",
        "num_expected_tokens",
        "num_queued_tokens",
        "num_seats",
    )

    def __init__(
        self, node: Node, num_tokens: int, num_queued_tokens: int, num_sequences: int = 1, num_expected_tokens: int = 0
    ) -> None:
        """`num_expected_tokens`: so many of its tokens should be cached there."""
        self.node = node
        self._block_size = node.info.block_size
        self.num_expected_tokens = num_expected_tokens
        self.num_seats = num_sequences
        self.num_blocks = self._num_blocks_for(num_tokens)
        self.num_queued_tokens = num_queued_tokens
        self.is_admitted = False  # from then on the node's reports include its blocks
        node.reservations.add(self)
        node.num_seats_reserved += self.num_seats
        node.num_blocks_reserved += self.num_blocks
        node.num_tokens_sent += num_queued_tokens

    def holds(self, num_tokens: int) -> None:
        """All of its prompt has been computed, and it has so many tokens now."""
        if self.num_queued_tokens:
            self.queued_at_most(0)
        num_blocks = self._num_blocks_for(num_tokens)
        if num_blocks != self.num_blocks:
            self._set(num_blocks, self.num_queued_tokens)

    def queued_at_most(self, num_tokens: int) -> None:
        """No more than so many of its prompt tokens are still to be computed."""
        if num_tokens < self.num_queued_tokens:
            self._set(self.num_blocks, max(0, num_tokens))
            self.node.changed()

    def release(self) -> None:
        if self in self.node.reservations:
            self._set(0, 0)
            self.node.reservations.remove(self)
            self.node.num_seats_reserved -= self.num_seats
            self.node.changed()

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Each sequence has a last block of its own."""
        return num_blocks_for(num_tokens, self._block_size) + self.num_seats - 1

    def _set(self, num_blocks: int, num_queued_tokens: int) -> None:
        if self in self.node.reservations:
            self.node.num_blocks_reserved += num_blocks - self.num_blocks
            self.node.num_tokens_sent += num_queued_tokens - self.num_queued_tokens
            self.num_blocks = num_blocks
            self.num_queued_tokens = num_queued_tokens


class Node:
    """One node: who it is, its session, its load."""

    def __init__(
        self,
        info: NodeInfo,
        session: NodeSession,
        load: NodeLoad,
        changed: Callable[[], None],
        held: HeldBlocks | None = None,
    ) -> None:
        """`held` is kept by whoever hears of it; None: nobody does."""
        self.info = info
        self.session = session
        self.held = HeldBlocks(info.kv_identity, info.block_size, info.num_total_blocks) if held is None else held
        self.changed = changed
        self.load = load
        self.is_draining = False
        self.is_full = False
        self.reservations: set[Reservation] = set()
        self.num_seats_reserved = 0
        self.num_blocks_reserved = 0
        self.num_tokens_sent = 0
        self._num_blocks_elsewhere = 0
        self._num_seats_elsewhere = 0
        self._num_tokens_elsewhere = 0
        self.report(load, is_draining=False)

    def report(self, load: NodeLoad, *, is_draining: bool) -> None:
        """A heartbeat has come."""
        self.load = load
        self.is_draining |= is_draining
        self.is_full = False
        num_blocks_included = sum(one.num_blocks for one in self.reservations if one.is_admitted)
        self._num_blocks_elsewhere = self.info.num_total_blocks - load.num_free_blocks - num_blocks_included
        self._num_seats_elsewhere = max(0, load.num_running + load.num_waiting - self.num_seats_reserved)
        # Of who has not been admitted it counts all tokens as queued, those too that it will find in its cache.
        num_to_be_found = sum(
            one.num_expected_tokens for one in self.reservations if one.num_queued_tokens and not one.is_admitted
        )
        self._num_tokens_elsewhere = max(0, load.num_queued_tokens - self.num_tokens_sent - num_to_be_found)
        self.changed()

    def refused(self, *, is_draining: bool) -> None:
        """It said no to a request: whatever we thought, it has no room before its next report."""
        self.is_full = True
        self.is_draining |= is_draining

    def drain(self) -> None:
        self.is_draining = True

    def view(self) -> NodeView:
        info = self.info
        num_blocks_used = self._num_blocks_elsewhere + self.num_blocks_reserved
        return NodeView(
            address=info.address,
            connector=info.connector,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            num_total_blocks=info.num_total_blocks,
            max_tokens_held=info.max_tokens_held,
            num_free_blocks=min(info.num_total_blocks, max(0, info.num_total_blocks - num_blocks_used)),
            num_seats_taken=self._num_seats_elsewhere + self.num_seats_reserved,
            num_queued_tokens=self._num_tokens_elsewhere + self.num_tokens_sent,
            is_draining=self.is_draining,
            is_full=self.is_full,
            prefill_speed=self.load.prefill_speed,
            decode_step_s=self.load.decode_step_s,
            block_fetch_s=self.load.block_fetch_s,
        )


class NodePool:
    """All nodes with a live session. Whoever must know of changes subscribes."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._on_room: list[Callable[[], None]] = []
        self._on_members: list[Callable[[], None]] = []

    def when_room_changes(self, callback: Callable[[], None]) -> None:
        self._on_room.append(callback)

    def when_members_change(self, callback: Callable[[], None]) -> None:
        self._on_members.append(callback)

    def refusal(self, info: NodeInfo) -> str:
        """Why a node may not join those that are here; empty if it may."""
        return pairing_refusal(info, (node.info for node in self._nodes.values()))

    def add(self, info: NodeInfo, session: NodeSession, load: NodeLoad, held: HeldBlocks | None = None) -> Node:
        refusal = self.refusal(info)
        if refusal:
            raise NodeUnavailable(refusal)
        node = Node(info, session, load, self._tell_room, held)
        self._nodes[info.address] = node
        self._tell_members()
        return node

    def remove(self, node: Node) -> None:
        if self._nodes.get(node.info.address) is node:
            del self._nodes[node.info.address]
            self._tell_members()

    def __getitem__(self, address: str) -> Node:
        return self._nodes[address]

    def get(self, address: str) -> Node | None:
        return self._nodes.get(address)

    def nodes(self, role: Role | None = None) -> list[Node]:
        return [node for node in self._nodes.values() if role is None or node.info.role is role]

    def views(self, role: Role) -> list[NodeView]:
        return [node.view() for node in self.nodes(role)]

    def cached(self, prefix: Prefix | None) -> Cached:
        """How many of its tokens the node of an address holds, looked up when somebody asks."""

        def num_cached_tokens(address: str) -> int:
            return 0 if prefix is None else self._nodes[address].held.num_cached_tokens(prefix)

        return cache(num_cached_tokens)

    def can_prefill_elsewhere(self, need: Need, lost: Node) -> bool:
        others = [node.view() for node in self.nodes(Role.PREFILL) if node is not lost]
        return any(can_prefill(other, need) and other.connector == lost.info.connector for other in others)

    def _tell_room(self) -> None:
        _call_all(self._on_room)

    def _tell_members(self) -> None:
        _call_all(self._on_members)
        self._tell_room()


def _call_all(callbacks: Iterable[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
