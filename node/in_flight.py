"""The requests that a node has accepted and not ended, and the ways in which they begin and end.

Every accepted request ends in exactly one of: finished, failed, cancelled.
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
from kvasir.engine.types import FinishReason, Request, RequestId
from kvasir.node.metrics import NodeMetrics, Progress
from kvasir.node.session import Session
from kvasir.proto import common_pb2


@dataclass(eq=False, kw_only=True)
class InFlight:
    """One request on this node. What only one kind of node knows about it stands in a subclass."""

    session: Session
    handle: int
    request: Request
    deadline: asyncio.TimerHandle | None = None
    is_admitted: bool = False
    progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self.progress = Progress(self.request.arrival_s, len(self.request.prompt_token_ids))

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id


E = TypeVar("E", bound=InFlight)


class InFlightRequests(Generic[E]):
    """Found by engine id, or by session and handle.

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

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[E]:
        return iter(tuple(self._by_id.values()))

    def get(self, request_id: RequestId) -> E | None:
        return self._by_id.get(request_id)

    def find(self, session: Session, handle: int) -> E | None:
        return self._by_id.get(_request_id(session, handle))

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
        if message.num_sequences > 1:
            raise InvalidRequest(f"this node generates one sequence a request, got {message.num_sequences}", "n")
        if _request_id(session, handle) in self._by_id:
            raise InvalidRequest(f"handle {handle} is in use")
        request = wire.request_from_proto(
            wire.SequenceAddress(session.session_id, handle, 0),
            message,
            vocab_size=self._vocab_size,
            arrival_s=time.monotonic(),
            hand_off=hand_off,
            awaits=awaits,
        )
        self._check_fits(request)
        entry = make(session=session, handle=handle, request=request)
        if message.HasField("deadline_s"):
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(max(message.deadline_s, 0.0), self._deadline_passed, entry)
        self._by_id[entry.request_id] = entry
        self._metrics.started(entry.progress, request.sampling.max_tokens)
        return entry

    def finish(self, entry: E, reason: FinishReason) -> None:
        """The engine has given its last token."""
        self._metrics.finished(entry.progress, reason.value)
        self._remove(entry, reason)

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

    def cancel_all_of(self, session: Session) -> int:
        entries = [entry for entry in self if entry.session is session]
        for entry in entries:
            self.cancel(entry)
        return len(entries)

    def _stop(self, entry: E) -> None:
        with suppress(EngineDead):
            self._engine.cancel(entry.request_id)
        self._remove(entry, None)

    def _remove(self, entry: E, reason: FinishReason | None) -> None:
        del self._by_id[entry.request_id]
        if entry.deadline is not None:
            entry.deadline.cancel()
        self._on_end(entry, reason)

    def _deadline_passed(self, entry: E) -> None:
        self.fail(entry, DeadlineExceeded("the request's time is over"))


def _request_id(session: Session, handle: int) -> RequestId:
    return wire.request_id_of(wire.SequenceAddress(session.session_id, handle, 0))
