"""A worker's resumable streams, noted in the parent: what a client has seen of a stream survives the worker."""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvasir.common.logging import Sparse
from kvasir.proto import workers_pb2 as pb
from kvasir.router.batches import Batches
from kvasir.router.openai.stream_notes import StreamLog, StreamOrigin, TakenStream, line_of
from kvasir.router.types import RoutedRequest, TokenDelta
from kvasir.router.workers.places import NoAnswer, answer_of

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class HubNotes:
    """Of all streams of this worker."""

    def __init__(self, hub: Any, worker: int) -> None:
        self._hub = hub
        self._worker = worker
        self._sparse = Sparse()
        self._notes: Batches[pb.StreamNote, None] = Batches(self._send)

    def add(self, note: pb.StreamNote) -> asyncio.Future[None]:
        """Comes to its end when the parent has it, or does not answer."""
        return self._notes.add(note)

    def new_log(self, owner: str, origin: StreamOrigin, grace_s: float) -> StreamLog:
        return HubStreamLog(self, owner, origin, grace_s)

    async def take(self, owner: str, response_id: str, last_event: int, endpoint: str) -> TakenStream | bool:
        """If there is none for us: whether a worker has it."""
        request = pb.TakeStreamRequest(worker=self._worker, owner=owner, response_id=response_id, endpoint=endpoint)
        try:
            answer = await answer_of(self._hub.TakeStream, request, _TIMEOUT_S)
        except NoAnswer as error:
            self._failed(error)
            return False
        if not answer.HasField("head"):
            return bool(answer.is_held)
        origin = StreamOrigin.of(response_id, answer.head)
        num_noted = answer.lines.count(b"\n")
        log = HubStreamLog(self, owner, origin, answer.head.grace_s, num_noted)
        return TakenStream.of(origin, answer.head, answer.lines, log, last_event)

    async def close(self) -> None:
        """The channel is the process's."""

    async def _send(self, notes: Sequence[pb.StreamNote]) -> list[None]:
        try:
            request = pb.NoteStreamsRequest(worker=self._worker, notes=notes)
            await answer_of(self._hub.NoteStreams, request, _TIMEOUT_S)
        except Exception as error:  # whatever it is: no stream waits for it
            self._failed(error)
        return [None] * len(notes)

    def _failed(self, error: Exception) -> None:
        if self._sparse.allows("failed"):
            log.warning("streams are not noted while the parent does not answer: %r", error)


class HubStreamLog:
    """A `StreamLog`. A note that got lost leaves a gap, which the parent sees: it forgets the stream."""

    branch = ""  # nobody else goes on with it as long as we live

    def __init__(self, notes: HubNotes, owner: str, origin: StreamOrigin, grace_s: float, num_noted: int = 0) -> None:
        self._notes = notes
        self._owner = owner
        self._origin = origin
        self._grace_s = grace_s
        self._num_noted = num_noted

    async def begin(self, requests: Sequence[RoutedRequest]) -> None:
        head = self._origin.head(requests, self._grace_s)
        self._origin = replace(self._origin, body=b"")  # it may be large, and the parent has it
        await self._note(begun=head)

    async def add(self, delta: TokenDelta) -> None:
        tokens = pb.StreamTokens(number=self._num_noted, line=line_of(delta))
        self._num_noted += 1
        await self._note(tokens=tokens)

    def forget(self) -> None:
        self._note(is_over=True)

    def give_back(self) -> None:
        self._note(is_given_back=True)

    def _note(self, **what: Any) -> asyncio.Future[None]:
        return self._notes.add(pb.StreamNote(owner=self._owner, response_id=self._origin.response_id, **what))
