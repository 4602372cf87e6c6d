"""The requests that a node has accepted and not ended, and the ways in which they begin and end.

Every accepted request ends in exactly one of: finished, failed, cancelled. One with several sequences ends when the
last of them does; one sequence that fails fails the request.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvasir.common.errors import DeadlineExceeded, EngineDead, InvalidRequest
from kvasir.engine import wire
from kvasir.engine.async_engine import AsyncEngine
from kvasir.engine.request import FinishReason, Request, RequestId
from kvasir.node.metrics import NodeMetrics, Progress
from kvasir.node.session import Session
from kvasir.proto import common_pb2


@dataclass(eq=False, kw_only=True)
class InFlight:
    """One request on this node. What only one kind of node knows about it stands in a subclass."""

    session: Session
    handle: int
    sequences: tuple[Request, ...]  # the first leads the others
    deadline: asyncio.TimerHandle | None = None
    is_admitted: bool = False
    reason: FinishReason | None = None  # of what has finished so far: handed off, if anything was
    open_sequences: set[int] = field(init=False)  # that have not ended yet
    progress: tuple[Progress, ...] = field(init=False)  # of each sequence

    def __post_init__(self) -> None:
        self.open_sequences = set(range(len(self.sequences)))
        num_prompt_tokens = len(self.request.prompt_token_ids)
        self.progress = tuple(Progress(one.arrival_s, num_prompt_tokens) for one in self.sequences)

    @property
    def request(self) -> Request:
        """The one that is admitted, whose blocks are loaded and reported."""
        return self.sequences[0]

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id


E = TypeVar("E", bound=InFlight)


class InFlightRequests(Generic[E]):
    """Found by the engine id of any of its sequences, or by session and handle.

    `on_end(entry, reason)` is told of each that ends; without a reason it has failed or is cancelled.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        check_fits: Callable[[Request], None],
        metrics: NodeMetrics,
        vocab_size: int,
        on_end: Callable[[E, FinishReason | None], None],
    ) -> None:
        self._engine = engine
        self._check_fits = check_fits
        self._metrics = metrics
        self._vocab_size = vocab_size
        self._on_end = on_end
        self._by_id: dict[RequestId, E] = {}
        self._by_handle: dict[tuple[Session, int], E] = {}

    def __len__(self) -> int:
        return len(self._by_handle)

    def __iter__(self) -> Iterator[E]:
        return iter(tuple(self._by_handle.values()))

    def get(self, request_id: RequestId) -> E | None:
        return self._by_id.get(request_id)

    def find(self, session: Session, handle: int) -> E | None:
        return self._by_handle.get((session, handle))

    def begin(
        self,
        make: Callable[..., E],
        session: Session,
        handle: int,
        message: common_pb2.GenerationRequest,
        *,
        hand_off: bool = False,
        awaits: Collection[str] = (),
    ) -> E:
        """Accept a request, or raise InvalidRequest. It is not with the engine yet."""
        if (session, handle) in self._by_handle:
            raise InvalidRequest(f"handle {handle} is in use")
        sequences = wire.requests_from_proto(
            session.session_id,
            handle,
            message,
            vocab_size=self._vocab_size,
            arrival_s=time.monotonic(),
            hand_off=hand_off,
            awaits=awaits,
        )
        self._check_fits(sequences[0])
        entry = make(session=session, handle=handle, sequences=sequences)
        if message.HasField("deadline_s"):
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(max(message.deadline_s, 0.0), self._deadline_passed, entry)
        self._by_handle[session, handle] = entry
        self._by_id.update((request.request_id, entry) for request in sequences)
        self._metrics.started(entry.progress[0], sequences[0].sampling.max_tokens)
        return entry

    def finish(self, entry: E, sequence: int, reason: FinishReason) -> None:
        """The engine has given the sequence's last token."""
        self._metrics.finished(entry.progress[sequence], reason.value)
        if entry.reason is not FinishReason.HANDED_OFF:
            entry.reason = reason
        self._end(entry, sequence)

    def fail(self, entry: E, error: Exception) -> None:
        self._metrics.failed(error)
        entry.session.tell_failed(wire.failure_to_proto(entry.handle, error))
        self._stop(entry)

    def refuse(self, session: Session, handle: int, error: Exception) -> None:
        """Fail what goes by this handle, accepted or not."""
        entry = self.find(session, handle)
        if entry is not None:
            self.fail(entry, error)
        else:
            self._metrics.failed(error)
            session.tell_failed(wire.failure_to_proto(handle, error))

    def cancel(self, entry: E) -> None:
        self._metrics.cancelled()
        self._stop(entry)

    def cancel_sequence(self, entry: E, sequence: int) -> None:
        """The others go on. Fine for one that has ended."""
        if sequence in entry.open_sequences:
            self._metrics.cancelled()
            with suppress(EngineDead):
                self._engine.cancel(entry.sequences[sequence].request_id)
            self._end(entry, sequence)

    def cancel_all_of(self, session: Session) -> int:
        entries = [entry for entry in self if entry.session is session]
        for entry in entries:
            self.cancel(entry)
        return len(entries)

    def _stop(self, entry: E) -> None:
        with suppress(EngineDead):
            for request in entry.sequences:
                self._engine.cancel(request.request_id)
        self._remove(entry, None)

    def _end(self, entry: E, sequence: int) -> None:
        entry.open_sequences.remove(sequence)
        if not entry.open_sequences:
            self._remove(entry, entry.reason)

    def _remove(self, entry: E, reason: FinishReason | None) -> None:
        del self._by_handle[entry.session, entry.handle]
        for request in entry.sequences:
            del self._by_id[request.request_id]
        if entry.deadline is not None:
            entry.deadline.cancel()
        self._on_end(entry, reason)

    def _deadline_passed(self, entry: E) -> None:
        self.fail(entry, DeadlineExceeded("the request's time is over"))
