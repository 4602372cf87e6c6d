"""The one queue of the router: requests wait here, and nowhere behind it, for a pair of nodes with room.

By priority, which whoever waits gains with time, and then by arrival. Whoever is first is passed by nobody that would
fit sooner, so a large request is never starved by small ones; only by others where no node here could ever hold it. A
request that comes back (its node was lost, or said no) takes its old place, and is not refused for want of room in the
queue. One that leaves while it waits has never been at any node.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.common.errors import NodeUnavailable, Overloaded, ServingError
from kvasir.router.costs import Cached
from kvasir.router.nodes import Role
from kvasir.router.policy import Rules, can_ever_decode, choose
from kvasir.router.pool import NodePool, Reservation
from kvasir.router.views import Need, NodeView

_TICK_S = 0.1
_ROUNDS = 8  # by default, so many times what the decode nodes hold at once may wait
_WITHOUT_NODES = (512, 1 << 20)  # requests and tokens that may wait for nodes to come
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Room that has been reserved for a request; whoever gets it must release it."""

    decode: Reservation
    prefill: Reservation | None
    why_local: str = ""  # see `policy.Choice`

    def release(self) -> None:
        self.decode.release()
        if self.prefill is not None:
            self.prefill.release()


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """A request's place in the line, kept for all of its life."""

    due_s: float  # smaller is earlier
    number: int


class Entry:
    """One request in the line. `placed` is called once: with the room, or with why there will be none."""

    def __init__(self, turn: Turn, need: Need, placed: Callable[[Placement | ServingError], None]) -> None:
        self.turn = turn
        self.need = need
        self.placed = placed
        self.joined_s = 0.0  # by the queue's clock
        self.stranded_since_s: float | None = None  # no node that is here could ever hold it


class AdmissionQueue:
    def __init__(
        self,
        pool: NodePool,
        rules: Rules,
        *,
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None,
        node_wait_s: float,
        num_sharing: int = 1,
        priority_aging_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """None: sized to the decode nodes that are here, of which each of `num_sharing` routers takes its part.

        priority_aging_s: who waits gains a level of priority in each so many seconds, so that nobody is passed for ever
        by those who come later; 0: never.
        """
        self._pool = pool
        self._rules = rules
        self._max_num_reqs = max_num_queued_reqs
        self._max_num_tokens = max_num_queued_tokens
        self._node_wait_s = node_wait_s
        self._num_sharing = num_sharing
        self._aging_s = priority_aging_s
        self._clock = clock
        self._line: list[Entry] = []
        self._num_turns = 0
        self._num_tokens = 0
        self._waited_s = 0.0  # by the last one that was placed: what a client that finds the line full may expect
        self._last_prefill = ""
        self._last_decode = ""
        pool.when_room_changes(self.pump)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_tokens

    def take_turn(self, priority: int, num_tokens: int) -> Turn:
        """A new request's place. Overloaded if the line is full; one that finds nobody waiting is never refused."""
        if self._line and not self._has_room(num_tokens):
            retry_after_s = min(max(self._waited_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
            waiting = f"{len(self._line)} requests with {self._num_tokens} prompt tokens are waiting"
            raise Overloaded(f"{waiting}; try again later", retry_after_s)
        self._num_turns += 1
        due_s = self._clock() + priority * self._aging_s if self._aging_s else float(priority)
        return Turn(due_s, self._num_turns)

    def _has_room(self, num_tokens: int) -> bool:
        nodes = self._pool.views(Role.DECODE)
        num_reqs, most_tokens = _WITHOUT_NODES
        if nodes:
            num_reqs = _ROUNDS * sum(node.max_num_seqs for node in nodes) // self._num_sharing
            most_tokens = _ROUNDS * sum(node.num_total_blocks * node.block_size for node in nodes) // self._num_sharing
        num_reqs = self._max_num_reqs or num_reqs
        most_tokens = self._max_num_tokens or most_tokens
        return len(self._line) < num_reqs and self._num_tokens + num_tokens <= most_tokens

    def join(self, entry: Entry) -> None:
        entry.joined_s = self._clock()
        insort(self._line, entry, key=lambda one: one.turn)
        self._num_tokens += entry.need.num_tokens
        self.pump()

    def leave(self, entry: Entry) -> None:
        """Harmless if it has been placed already."""
        if entry in self._line:
            self._line.remove(entry)
            self._num_tokens -= entry.need.num_tokens
            self.pump()

    def pump(self) -> None:
        """Place from the front of the line for as long as there is room."""
        if not self._line:
            return
        nodes = self._pool.views(Role.DECODE)
        for entry in list(self._line):
            if not any(can_ever_decode(node, entry.need) for node in nodes):
                continue  # it waits for a node to come, and keeps nobody from those that are here
            placement = self._place(entry.need, nodes)
            if placement is None:
                return
            self._line.remove(entry)
            self._num_tokens -= entry.need.num_tokens
            self._waited_s = self._clock() - entry.joined_s
            entry.placed(placement)
            if self._line:
                nodes = self._pool.views(Role.DECODE)  # they have less room now

    def expire(self) -> None:
        """End the wait of those that no node here could ever hold, once they have waited long enough for another."""
        if not self._line:
            return
        now = self._clock()
        nodes = self._pool.views(Role.DECODE)
        for entry in list(self._line):
            if any(can_ever_decode(node, entry.need) for node in nodes):
                entry.stranded_since_s = None
            elif entry.stranded_since_s is None:
                entry.stranded_since_s = now
            elif now - entry.stranded_since_s >= self._node_wait_s:
                self.leave(entry)
                entry.placed(NodeUnavailable(f"no decode node has come for {self._node_wait_s:g} s"))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.expire()

    def _place(self, need: Need, decode_views: Sequence[NodeView]) -> Placement | None:
        prefill_views = self._pool.views(Role.PREFILL) if need.wants_prefill else []
        cached = self._pool.cached(need.prefix)
        last = self._last_prefill, self._last_decode
        choice = choose(need, prefill_views, decode_views, self._rules, cached, *last)
        if choice is None:
            return None
        self._last_decode = choice.decode.address
        is_local = need.wants_prefill and choice.prefill is None
        decode = self._reserve(choice.decode, need, cached, computes=is_local, num_sequences=need.num_sequences)
        if choice.prefill is None:
            return Placement(decode, None, choice.why_local)
        self._last_prefill = choice.prefill.address
        return Placement(decode, self._reserve(choice.prefill, need, cached, computes=True))

    def _reserve(
        self, view: NodeView, need: Need, cached: Cached, *, computes: bool, num_sequences: int = 1
    ) -> Reservation:
        """`computes`: the prompt, or what is expected to be lacking of it. On a decode node one more token has room."""
        node, num_expected = self._pool[view.address], cached(view.address)
        num_tokens = need.num_tokens + (node.info.role is Role.DECODE)
        num_queued_tokens = need.num_tokens - num_expected if computes else 0
        return Reservation(node, num_tokens, num_queued_tokens, num_sequences, num_expected)
