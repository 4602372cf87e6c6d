"""What is noted of resumable streams, in the parent: a stream whose worker dies is any worker's to go on with."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir.proto import workers_pb2 as pb

_Key = tuple[str, str]  # owner, response id


@dataclass(eq=False, slots=True)
class _Record:
    head: pb.StreamHead
    worker: int | None  # that has it; None: it has died
    lines: bytearray = field(default_factory=bytearray)
    num_lines: int = 0
    until_s: float | None = None  # while no worker has it

    @property
    def num_bytes(self) -> int:
        prompts: list[pb.StreamHead | pb.StreamPrompt] = [self.head, *self.head.further_prompts]
        return len(self.head.body) + sum(len(one.prompt_token_ids) for one in prompts) + len(self.lines)


class StreamRecords:
    """A tenant's do not take the room of others: who has the most loses the oldest."""

    def __init__(self, *, max_bytes: int = 256 << 20, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._records: dict[_Key, _Record] = {}  # oldest first
        self._num_bytes: Counter[str] = Counter()  # by owner

    def __len__(self) -> int:
        return len(self._records)

    def note(self, worker: int, note: pb.StreamNote) -> None:
        key = note.owner, note.response_id
        if note.HasField("begun"):
            self._forget(key)
            self._records[key] = _Record(note.begun, worker)
            self._num_bytes[note.owner] += self._records[key].num_bytes
            self._make_room()
            return
        record = self._records.get(key)
        if record is None or record.worker != worker:
            return
        if note.HasField("tokens"):
            self._append(key, record, note.tokens)
        elif note.is_over:
            self._forget(key)
        else:
            self._orphan(record)

    def take(self, worker: int, owner: str, response_id: str, endpoint: str) -> pb.TakeStreamResponse:
        self.drop_old()
        record = self._records.get((owner, response_id))
        if record is None or record.head.endpoint != endpoint:
            return pb.TakeStreamResponse()
        if record.worker is not None:
            return pb.TakeStreamResponse(is_held=True)
        record.worker, record.until_s = worker, None
        return pb.TakeStreamResponse(head=record.head, lines=bytes(record.lines))

    def died(self, worker: int) -> None:
        for record in self._records.values():
            if record.worker == worker:
                self._orphan(record)

    def drop_old(self) -> None:
        now_s = self._clock()
        for key in [key for key, one in self._records.items() if one.until_s is not None and one.until_s <= now_s]:
            self._forget(key)

    def _append(self, key: _Key, record: _Record, tokens: pb.StreamTokens) -> None:
        if tokens.number != record.num_lines:  # something has not come: nobody could go on from here
            self._forget(key)
            return
        record.lines += tokens.line
        record.num_lines += 1
        self._num_bytes[key[0]] += len(tokens.line)
        self._make_room()

    def _orphan(self, record: _Record) -> None:
        record.worker, record.until_s = None, self._clock() + record.head.grace_s

    def _make_room(self) -> None:
        while self._num_bytes.total() > self._max_bytes:
            [(owner, _)] = self._num_bytes.most_common(1)
            self._forget(next(key for key in self._records if key[0] == owner))

    def _forget(self, key: _Key) -> None:
        record = self._records.pop(key, None)
        if record is not None:
            self._num_bytes[key[0]] -= record.num_bytes
            if not self._num_bytes[key[0]]:
                del self._num_bytes[key[0]]
