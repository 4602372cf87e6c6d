"""From the bytes of a request to its answer, in one piece or as a stream, and back to a stream that was left."""

import math
import reprlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvasir.common.errors import InvalidRequest
from kvasir.router.metrics import RequestRecord, RouterMetrics
from kvasir.router.openai.answer import Answer, outcome_of
from kvasir.router.openai.begun import Begun
from kvasir.router.openai.bodies import Bodies
from kvasir.router.openai.client_gone import unless_gone
from kvasir.router.openai.errors import CLIENT_LEFT, StreamNotKept, json_response
from kvasir.router.openai.event_ids import Numbering, parse_event_id
from kvasir.router.openai.kept_streams import KeptStreams
from kvasir.router.openai.models import GenerationBody
from kvasir.router.openai.opening import Opening
from kvasir.router.openai.sse import HEARTBEAT_S, EventStream
from kvasir.router.openai.stream_notes import StreamLog, StreamOrigin, TakenStream
from kvasir.router.tenants.tenant import current_tenant

B = TypeVar("B", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    name: str
    kind: type[B]
    id_prefix: str  # of answers
    prepare: Callable[[B, RequestRecord, StreamOrigin], Awaitable[tuple[Answer, Begun]]]


class Serving:
    """What all endpoints that generate do alike."""

    def __init__(self, metrics: RouterMetrics, bodies: Bodies, streams: KeptStreams) -> None:
        self._metrics = metrics
        self._bodies = bodies
        self._streams = streams

    async def serve(self, request: Request, endpoint: Endpoint[B]) -> Response:
        last_event_id = request.headers.get("last-event-id")
        if last_event_id is not None:
            return await self._resume(request, endpoint, last_event_id)
        record = self._metrics.begin(endpoint.name)
        try:
            data = await self._bodies.arrived(request)
            body, num_unknown = await self._bodies.parse(data, endpoint.kind)
            self._metrics.unknown_fields(num_unknown)
            if body.timeout is None and (timeout_s := timeout_of(request.headers)) is not None:
                body = body.model_copy(update={"timeout": timeout_s})
            origin = StreamOrigin(
                response_id=f"{endpoint.id_prefix}{uuid.uuid4().hex}",
                created=int(time.time()),
                endpoint=endpoint.name,
                body=data,
                timeout_s=body.timeout,
            )
            return await unless_gone(request.receive, self._answer(endpoint, body, record, origin))
        except Exception as error:
            record.end("abort" if isinstance(error, CLIENT_LEFT) else outcome_of(error))
            raise

    async def _resume(self, request: Request, endpoint: Endpoint[B], last_event_id: str) -> Response:
        await self._bodies.arrived(request)
        if not parse_event_id(last_event_id).response_id.startswith(endpoint.id_prefix):
            raise StreamNotKept  # here: it is another endpoint's
        found = await self._streams.resume(current_tenant.get().owner, last_event_id, endpoint.name)
        if isinstance(found, EventStream):
            return found
        return await unless_gone(request.receive, self._go_on(endpoint, found))

    async def _answer(self, endpoint: Endpoint[B], body: B, record: RequestRecord, origin: StreamOrigin) -> Response:
        answer, begun = await endpoint.prepare(body, record, origin)
        if not body.stream:
            try:
                return json_response(await answer.whole(begun.deltas))
            finally:
                await begun.deltas.aclose()
        if (grace_s := body.resume_grace_s) is not None:
            log = self._streams.new_log(current_tenant.get().owner, origin, grace_s)
            try:
                return await self._keep(answer, begun, grace_s, log)
            except BaseException:
                if log is not None:
                    log.forget()
                raise
        short_way = begun.short_way
        opening = Opening(begun.deltas, short_way)
        await opening.wait(HEARTBEAT_S)
        numbering = Numbering(answer.response_id)
        if short_way is not None:
            short_way.through(answer, numbering)
        events = numbering.all(answer.events(opening.deltas()))
        return EventStream(events, close=opening.aclose, short_way=short_way)

    async def _keep(
        self, answer: Answer, begun: Begun, grace_s: float, log: StreamLog | None, taken: TakenStream | None = None
    ) -> EventStream:
        """The stream of a client that may come back."""
        owner, numbering, last_event = current_tenant.get().owner, Numbering(answer.response_id, log), 0
        with self._streams.room(owner):
            if taken is not None:
                last_event = taken.last_event
                begun.tape.go_on_with(taken, lambda: last_event > max(numbering.number, answer.num_openings))
            elif log is not None:
                begun.tape.note_to(log)
            opening = Opening(begun.deltas)
            await opening.wait(HEARTBEAT_S)
            events = numbering.all(answer.events(opening.deltas()))
            return self._streams.keep(owner, numbering, events, opening.aclose, grace_s, log, last_event)

    async def _go_on(self, endpoint: Endpoint[B], taken: TakenStream) -> EventStream:
        """The process that streamed it has died: the same events again, and then those that it has not come to."""
        origin = taken.origin
        record = self._metrics.begin(endpoint.name)
        try:
            body, _ = await self._bodies.parse(origin.body, endpoint.kind)
            timeout_s = origin.timeout_s
            if timeout_s is not None:
                timeout_s = max(0.001, timeout_s - (time.time() - origin.created))
            body = body.model_copy(update={"timeout": timeout_s})
            answer, begun = await endpoint.prepare(body, record, origin)
            grace_s = body.resume_grace_s
            assert grace_s is not None, "it was kept for so long before"
            return await self._keep(answer, begun, grace_s, taken.log, taken)
        except BaseException as error:
            record.end(outcome_of(error) if isinstance(error, Exception) else "abort")
            taken.log.give_back()
            raise

    async def body_of(self, request: Request, kind: type[B]) -> B:
        body, num_unknown = await self._bodies.parse(await self._bodies.arrived(request), kind)
        self._metrics.unknown_fields(num_unknown)
        return body


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Seconds for the whole answer, for those who set headers more easily than fields."""
    text = headers.get("x-request-timeout")
    if text is None:
        return None
    with suppress(ValueError):
        if 0 < (timeout_s := float(text)) < math.inf:
            return timeout_s
    raise InvalidRequest(f"x-request-timeout must be seconds, got {reprlib.repr(text)}", "timeout", "invalid_value")
