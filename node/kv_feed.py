"""What a node's prefix cache holds, told to routers as changes, or whole when they come and when they ask."""

from collections.abc import Iterable

from kvasir.common.hashing import BlockHash
from kvasir.engine import wire
from kvasir.proto import common_pb2

_MAX_ENTRIES = 8192  # in one message; 8 bytes each


class KVMirror:
    """The prefix cache's content as the event loop knows it. One a node."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()

    def apply(self, stored: Iterable[BlockHash], dropped: Iterable[BlockHash]) -> None:
        self.hashes.difference_update(dropped)
        self.hashes.update(stored)

    def num_leading(self, hashes: Iterable[BlockHash]) -> int:
        """How many of the first hashes are cached here, give or take what has changed since the last step."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self.hashes:
                break
            count += 1
        return count


class KVFeed:
    """One session's share of it. Changes gather here until they are taken.

    A reader drops first and stores then. A hash is never in both: the later change counts. Messages are numbered from
    1, so a reader that finds a gap knows that it must ask for a snapshot.
    """

    def __init__(self, mirror: KVMirror) -> None:
        self._mirror = mirror
        self._stored: set[BlockHash] = set()
        self._dropped: set[BlockHash] = set()
        self._wants_snapshot = bool(mirror.hashes)  # its reader takes the cache for empty
        self._next_sequence = 1

    @property
    def has_news(self) -> bool:
        return bool(self._wants_snapshot or self._stored or self._dropped)

    def add(self, stored: Iterable[BlockHash], dropped: Iterable[BlockHash]) -> None:
        if self._wants_snapshot:
            return  # the mirror has them
        self._stored.difference_update(dropped)
        self._dropped.update(dropped)
        self._dropped.difference_update(stored)
        self._stored.update(stored)
        if len(self._stored) + len(self._dropped) > max(_MAX_ENTRIES, len(self._mirror.hashes)):
            self.ask_snapshot()  # the whole is smaller than what has changed

    def ask_snapshot(self) -> None:
        self._wants_snapshot = True
        self._forget_changes()

    def take(self) -> list[common_pb2.KVEvents]:
        """What is to be told now; usually nothing, or one message."""
        stored = list(self._mirror.hashes if self._wants_snapshot else self._stored)
        dropped = list(self._dropped)
        messages: list[common_pb2.KVEvents] = []
        is_snapshot, self._wants_snapshot = self._wants_snapshot, False
        self._forget_changes()
        for start in range(0, max(len(stored), len(dropped), is_snapshot), _MAX_ENTRIES):
            part = slice(start, start + _MAX_ENTRIES)
            is_first = is_snapshot and start == 0
            messages.append(wire.kv_events_to_proto(self._next_sequence, stored[part], dropped[part], is_first))
            self._next_sequence += 1
        return messages

    def _forget_changes(self) -> None:
        self._stored = set()
        self._dropped = set()
