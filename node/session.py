"""The node's side of its routers' sessions: which there are, who is connected, when one ends.

A session outlives its stream by a grace time, in which the router may come back and name the last event that it saw.
It ends, and with it all its requests, when the grace is over or when the same router opens another one. Session ids
are `<router>/<anything>`; what stands before the last slash says which ones are of the same router.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from kvasir.common.hashing import BlockHash
from kvasir.node.event_log import EventLog
from kvasir.node.kv_feed import KVFeed, KVMirror
from kvasir.proto import common_pb2

GRACE_S = 5.0


class Session:
    """One router's conversation with this node, over one stream after another."""

    def __init__(self, session_id: str, mirror: KVMirror) -> None:
        self.session_id = session_id
        self.log = EventLog()
        self.kv_feed = KVFeed(mirror)
        self.changed = asyncio.Event()  # there may be something to write
        self.last_command = 0
        self.stream = 0  # counts this session's streams: an older one has nothing to say any more
        self.detached_at_s: float | None = None
        self.has_ended = False

    @property
    def router(self) -> str:
        return self.session_id.rpartition("/")[0] or self.session_id

    def is_new_command(self, number: int) -> bool:
        """Commands count from 1; a router that resumes may repeat some. Those without a number carry 0."""
        if number == 0:
            return True
        is_new = number > self.last_command
        self.last_command = max(self.last_command, number)
        return is_new

    def tell(self, output: common_pb2.StepOutput) -> None:
        self.log.add_step(output)
        self.changed.set()

    def tell_failed(self, failed: common_pb2.RequestFailed) -> None:
        self.log.add_failed(failed)
        self.changed.set()

    def tell_cached(self, stored: Sequence[BlockHash], dropped: Sequence[BlockHash]) -> None:
        """What the prefix cache has gained and lost."""
        self.kv_feed.add(stored, dropped)
        self.changed.set()

    def tell_all_cached(self) -> None:
        self.kv_feed.ask_snapshot()
        self.changed.set()

    def flush_kv_feed(self) -> None:
        """Into the log, unless that is full: then what is to come merges here."""
        if not self.log.is_full:
            for kv_events in self.kv_feed.take():
                self.log.add_kv_events(kv_events)


class Sessions:
    """All sessions of a node. `on_end` cancels what an ended one has left."""

    def __init__(
        self,
        mirror: KVMirror,
        on_end: Callable[[Session], None],
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
    ) -> None:
        self._mirror = mirror
        self._on_end = on_end
        self._clock = clock
        self._grace_s = grace_s
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._by_id.values()))

    @property
    def num_listening(self) -> int:
        """Sessions whose router is there and has not heard all of it yet."""
        return sum(session.detached_at_s is None and not session.log.is_delivered for session in self)

    def open(self, session_id: str, last_event: int) -> tuple[Session, bool]:
        """The session for a new stream, and whether it goes on where an earlier stream ended."""
        session = self._by_id.get(session_id)
        resumed = session is not None and session.log.resume(last_event)
        if session is None or not resumed:
            session = self._begin(session_id)
        session.stream += 1
        session.detached_at_s = None
        session.changed.set()  # an older stream notices that it is one
        return session, resumed

    def detach(self, session: Session, stream: int) -> None:
        """The stream has ended. The grace begins, unless another stream has taken over already."""
        if session.stream == stream and not session.has_ended:
            session.detached_at_s = self._clock()

    def expire(self) -> None:
        """To be called now and then: ends the sessions whose grace is over."""
        now = self._clock()
        for session in self:
            if session.detached_at_s is not None and now - session.detached_at_s >= self._grace_s:
                self.end(session)

    def end(self, session: Session) -> None:
        if session.has_ended:
            return
        session.has_ended = True
        del self._by_id[session.session_id]
        session.changed.set()
        self._on_end(session)

    def _begin(self, session_id: str) -> Session:
        session = Session(session_id, self._mirror)
        for other in self:
            if other.router == session.router:
                self.end(other)
        self._by_id[session_id] = session
        return session
