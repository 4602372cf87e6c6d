"""The generation endpoints: what both do, from the bytes of a request to its answer."""

import math
import reprlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvasir.common.errors import InvalidRequest, ServingError
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.asked import asked_grammar
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.metrics import RequestRecord, RouterMetrics
from kvasir.router.openai.answer import Answer, AnswerRecord, ChoicesAnswer, outcome_of
from kvasir.router.openai.begun import Begun, begin
from kvasir.router.openai.best_of import check_best_of
from kvasir.router.openai.bodies import Bodies
from kvasir.router.openai.body import read_body
from kvasir.router.openai.chat import ChatShape
from kvasir.router.openai.client_gone import ClientGone, unless_gone
from kvasir.router.openai.completions import CompletionShape
from kvasir.router.openai.envelope import Envelope
from kvasir.router.openai.errors import ModelNotFound, error_response, json_response
from kvasir.router.openai.kept_streams import KeptStreams, Numbering, not_kept, parse_event_id
from kvasir.router.openai.models import ChatBody, CompletionBody, GenerationBody
from kvasir.router.openai.opening import Opening
from kvasir.router.openai.prompts import Prompt, chat_prompt, completion_prompts
from kvasir.router.openai.reading import ModelHabits, Reading, reading_of
from kvasir.router.openai.routing import routed_requests
from kvasir.router.openai.sampling import text_rules_of
from kvasir.router.openai.sse import HEARTBEAT_S, EventStream
from kvasir.router.openai.structured import checked, with_grammar
from kvasir.router.openai.tape import StreamLog, StreamOrigin, TakenStream
from kvasir.router.tenants.tenant import current_tenant
from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import Backend, ClusterLimits

B = TypeVar("B", bound=GenerationBody)
CLIENT_CLOSED_REQUEST = 499  # nobody is there to read it


@dataclass(frozen=True, slots=True)
class Generation:
    answer: Answer
    begun: Begun


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[B]):
    name: str
    kind: type[B]
    id_prefix: str  # of answers
    prepare: Callable[[B, RequestRecord, StreamOrigin], Awaitable[Generation]]


class OpenAIApi:
    def __init__(
        self,
        backend: Backend,
        tokenizer: TextTokenizer,
        renderer: ChatRenderer,
        metrics: RouterMetrics,
        *,
        model_names: Sequence[str],
        max_request_bytes: int,
        max_logprobs: int,
        habits: ModelHabits,
        grammars: GrammarChecker,
        streams: KeptStreams,
        bodies: Bodies,
        created: int,
    ) -> None:
        """`created`: when the model was, in seconds since 1970, as every process of every router says it."""
        self._bodies = bodies
        self._backend = backend
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._habits = habits
        self._grammars = grammars
        self._streams = streams
        self._metrics = metrics
        self.model_names = tuple(model_names)
        self._max_request_bytes = max_request_bytes
        self._max_logprobs = max_logprobs
        self._created = created

    async def completions(self, request: Request) -> Response:
        return await self.serve(request, Endpoint("completions", CompletionBody, "cmpl-", self._prepare_completion))

    async def chat_completions(self, request: Request) -> Response:
        return await self.serve(request, Endpoint("chat/completions", ChatBody, "chatcmpl-", self._prepare_chat))

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(self._card(name)) if name in self.model_names else error_response(ModelNotFound(name))

    async def serve(self, request: Request, endpoint: Endpoint[B]) -> Response:
        last_event_id = request.headers.get("last-event-id")
        if last_event_id is not None:
            return await self._resume(request, endpoint, last_event_id)
        record = self._metrics.begin(endpoint.name)
        try:
            data = await read_body(request, self._max_request_bytes)
            body, num_unknown = await self._bodies.parse(data, endpoint.kind)
            self._metrics.unknown_fields(num_unknown)
            if body.timeout is None:
                body = body.model_copy(update={"timeout": timeout_of(request.headers)})
            origin = StreamOrigin(
                response_id=f"{endpoint.id_prefix}{uuid.uuid4().hex}",
                created=int(time.time()),
                endpoint=endpoint.name,
                body=data,
                timeout_s=body.timeout,
            )
            return await unless_gone(request.receive, self._answer(endpoint, body, record, origin))
        except (ClientDisconnect, ClientGone):
            record.end("abort")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            record.end(outcome_of(error))
            return error_response(error)

    async def _resume(self, request: Request, endpoint: Endpoint[B], last_event_id: str) -> Response:
        try:
            await read_body(request, self._max_request_bytes)
            if not parse_event_id(last_event_id)[0].startswith(endpoint.id_prefix):
                raise not_kept()  # there: it is another endpoint's
            found = await self._streams.resume(current_tenant.get().owner, last_event_id, endpoint.name)
            if isinstance(found, EventStream):
                return found
            return await unless_gone(request.receive, self._go_on(endpoint, found))
        except (ClientDisconnect, ClientGone):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return error_response(error)

    async def _answer(self, endpoint: Endpoint[B], body: B, record: RequestRecord, origin: StreamOrigin) -> Response:
        generation = await endpoint.prepare(body, record, origin)
        answer, deltas = generation.answer, generation.begun.deltas
        if not body.stream:
            try:
                return json_response(await answer.whole(deltas))
            finally:
                await deltas.aclose()
        if (grace_s := body.resume_grace_s) is not None:
            log = None
            if generation.begun.tape is not None:
                log = self._streams.new_log(current_tenant.get().owner, origin, grace_s)
            try:
                return await self._keep(generation, grace_s, log)
            except BaseException:
                if log is not None:
                    log.forget()
                raise
        short_way = generation.begun.short_way
        opening = Opening(deltas, short_way)
        await opening.wait(HEARTBEAT_S)
        numbering = Numbering(answer.response_id)
        if short_way is not None:
            short_way.through(answer.events_of, numbering.numbered)
        events = numbering.all(answer.events(opening.deltas()))
        return EventStream(events, close=opening.aclose, short_way=short_way)

    async def _keep(
        self, generation: Generation, grace_s: float, log: StreamLog | None, last_event: int = 0
    ) -> EventStream:
        """The stream of a client that may come back."""
        answer, begun, owner = generation.answer, generation.begun, current_tenant.get().owner
        with self._streams.room(owner):
            if log is not None and begun.tape is not None:
                begun.tape.note_to(log)
            opening = Opening(begun.deltas)
            await opening.wait(HEARTBEAT_S)
            events = Numbering(answer.response_id).all(answer.events(opening.deltas()))
            return self._streams.keep(owner, answer.response_id, events, opening.aclose, grace_s, log, last_event)

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
            generation = await endpoint.prepare(body, record, origin)
            tape, grace_s = generation.begun.tape, body.resume_grace_s
            assert tape is not None, "streams of several prompts are not noted"
            assert grace_s is not None, "it was kept for so long before"
            tape.go_on_with(taken)
            return await self._keep(generation, grace_s, taken.log, taken.last_event)
        except BaseException as error:
            record.end(outcome_of(error) if isinstance(error, Exception) else "abort")
            taken.log.give_back()
            raise

    async def _prepare_completion(
        self, body: CompletionBody, record: RequestRecord, origin: StreamOrigin
    ) -> Generation:
        limits = self._begin(body, "logprobs")
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("'max_tokens' of 0 wants 'echo' to be true", "max_tokens", "invalid_value")
        check_best_of(body)
        prompts = await completion_prompts(body, self.tokenizer, limits)
        shape = CompletionShape(body, prompts, self.tokenizer)
        begun = await self._begun(body, record, limits, prompts, origin)
        return Generation(ChoicesAnswer(begun.envelope, shape), begun)

    async def _prepare_chat(self, body: ChatBody, record: RequestRecord, origin: StreamOrigin) -> Generation:
        prompt, begun = await self.begin_chat(body, record, origin)
        return Generation(ChoicesAnswer(begun.envelope, ChatShape(body, prompt, self.tokenizer)), begun)

    async def begin_chat(self, body: ChatBody, record: RequestRecord, origin: StreamOrigin) -> tuple[Prompt, Begun]:
        """The answer to a conversation, in whatever shape it is then sent."""
        prompt, reading, limits = await self.chat_prompt(body)
        return prompt, await self._begun(body, record, limits, [prompt], origin, reading)

    async def chat_prompt(self, body: ChatBody) -> tuple[Prompt, Reading, ClusterLimits]:
        limits = self._begin(body, "top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("'top_logprobs' wants 'logprobs' to be true", "top_logprobs", "invalid_value")
        reading = reading_of(body, self._habits)
        prompt = await chat_prompt(body, self._renderer, self.tokenizer, limits, reading.plan.shown)
        return prompt, reading, limits

    async def body_of(self, request: Request, kind: type[B]) -> B:
        return (await self._bodies.parse(await read_body(request, self._max_request_bytes), kind))[0]

    def _begin(self, body: GenerationBody, logprobs_param: str) -> ClusterLimits:
        """What needs no tokenizer."""
        if body.model not in self.model_names:
            raise ModelNotFound(body.model)
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("'stream_options' wants 'stream' to be true", "stream_options", "invalid_value")
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("'prompt_logprobs' cannot be streamed", "prompt_logprobs", "invalid_value")
        for param, number in ((logprobs_param, body.num_logprobs), ("prompt_logprobs", body.prompt_logprobs)):
            if (number or 0) > self._max_logprobs:
                message = f"'{param}' may be at most {self._max_logprobs}, got {number}"
                raise InvalidRequest(message, param, "invalid_value")
        return self._backend.limits()

    async def _begun(
        self,
        body: GenerationBody,
        record: RequestRecord,
        limits: ClusterLimits,
        prompts: Sequence[Prompt],
        origin: StreamOrigin,
        reading: Reading | None = None,
    ) -> Begun:
        requests = await routed_requests(body, prompts, limits, self.tokenizer, origin.response_id)
        asked = asked_grammar(body.response_format, body.structured_outputs)
        asked_by: dict[str, Grammar] = {}
        if asked is not None:
            asked_by[asked.param] = asked.grammar
            requests = [with_grammar(request, asked.grammar) for request in requests]
        rules = text_rules_of(body)
        num_sequences = body.num_sequences
        readers: Sequence[AnswerReader | None] = [None] * num_sequences
        if reading is not None:
            [prompt] = prompts
            requests = [reading.constrained(request, prompt) for request in requests]
            readers = [reading.new_reader(prompt, f"{origin.response_id}/{number}") for number in range(num_sequences)]
            rules = replace(rules, shown_markers=reading.markers)
            asked_by = dict(reading.plan.schemas) or asked_by
        requests = await checked(requests, self._grammars, asked_by)
        options = body.stream_options
        envelope = Envelope(
            response_id=origin.response_id,
            created=origin.created,
            model=body.model,
            prompt_lengths=tuple(len(prompt.token_ids) for prompt in prompts),
            num_choices=body.num_choices,
            num_sequences=num_sequences,
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )
        return begin(self._backend, requests, readers, rules, self.tokenizer, AnswerRecord(record, envelope), envelope)

    def _card(self, name: str) -> dict[str, Any]:
        try:
            max_model_len = self._backend.limits().max_model_len
        except ServingError:
            max_model_len = None
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvasir",
            "parent": None,
            "max_model_len": max_model_len,
        }


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Seconds for the whole answer, for those who set headers more easily than fields."""
    text = headers.get("x-request-timeout")
    if text is None:
        return None
    with suppress(ValueError):
        if 0 < (timeout_s := float(text)) < math.inf:
            return timeout_s
    raise InvalidRequest(f"x-request-timeout must be seconds, got {reprlib.repr(text)}", "timeout", "invalid_value")
