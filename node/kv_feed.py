"""What a node's prefix cache holds, told to routers as changes, or whole when they ask."""

from collections.abc import Iterable

from kvasir.common.hashing import BlockHash
from kvasir.proto import common_pb2

_MAX_ENTRIES = 100_000  # in one message; 64 bytes each


class KVMirror:
    """The prefix cache's content as the event loop knows it: hash -> parent. One a node."""

    def __init__(self) -> None:
        self.parents: dict[BlockHash, BlockHash] = {}

    def apply(self, stored: Iterable[tuple[BlockHash, BlockHash]], dropped: Iterable[BlockHash]) -> None:
        for block_hash in dropped:
            self.parents.pop(block_hash, None)
        self.parents.update(stored)

    def num_leading(self, hashes: Iterable[BlockHash]) -> int:
        """How many of the first hashes are cached here, give or take what has changed since the last step."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self.parents:
                break
            count += 1
        return count


class KVFeed:
    """One session's share of it. Changes gather here between two heartbeats.

    A reader drops first and stores then. A hash is never in both lists: the later change counts. Messages are numbered
    from 1, so a reader that finds a gap knows that it must ask for a snapshot.
    """

    def __init__(self, mirror: KVMirror) -> None:
        self._mirror = mirror
        self._stored: dict[BlockHash, BlockHash] = {}
        self._dropped: set[BlockHash] = set()
        self._wants_snapshot = False
        self._next_sequence = 1

    def add(self, stored: Iterable[tuple[BlockHash, BlockHash]], dropped: Iterable[BlockHash]) -> None:
        for block_hash in dropped:
            self._stored.pop(block_hash, None)
            self._dropped.add(block_hash)
        for block_hash, parent in stored:
            self._dropped.discard(block_hash)
            self._stored[block_hash] = parent
        if self._wants_snapshot:
            self._forget_changes()  # the mirror has them
        elif len(self._stored) + len(self._dropped) > max(_MAX_ENTRIES, len(self._mirror.parents)):
            self.ask_snapshot()  # the whole is smaller than what has changed

    def ask_snapshot(self) -> None:
        self._wants_snapshot = True
        self._forget_changes()

    def take(self) -> list[common_pb2.KVEvents]:
        """What is to be told now; usually nothing, or one message."""
        stored = list((self._mirror.parents if self._wants_snapshot else self._stored).items())
        dropped = list(self._dropped)
        messages: list[common_pb2.KVEvents] = []
        is_snapshot, self._wants_snapshot = self._wants_snapshot, False
        self._forget_changes()
        while stored or dropped or is_snapshot:
            blocks = [common_pb2.BlockStored(block_hash=h, parent_hash=p) for h, p in stored[:_MAX_ENTRIES]]
            events = common_pb2.KVEvents(
                first_sequence=self._next_sequence, snapshot=is_snapshot, stored=blocks, dropped=dropped[:_MAX_ENTRIES]
            )
            messages.append(events)
            self._next_sequence += 1
            stored, dropped, is_snapshot = stored[_MAX_ENTRIES:], dropped[_MAX_ENTRIES:], False
        return messages

    def _forget_changes(self) -> None:
        self._stored = {}
        self._dropped = set()
