"""The generation endpoints: what is checked of a body, and how its answer begins."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvasir.common.errors import InvalidRequest, ServingError
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.asked import asked_grammar
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.metrics import RequestRecord
from kvasir.router.openai.answer import AnswerRecord
from kvasir.router.openai.begun import Begun, begin
from kvasir.router.openai.best_of import check_best_of
from kvasir.router.openai.chat import ChatShape
from kvasir.router.openai.choices import ChoicesAnswer
from kvasir.router.openai.completions import CompletionShape
from kvasir.router.openai.envelope import Envelope
from kvasir.router.openai.errors import ModelNotFound, json_response
from kvasir.router.openai.models import ChatBody, CompletionBody, GenerationBody
from kvasir.router.openai.prompts import Prompt, chat_prompt, completion_prompts
from kvasir.router.openai.reading import ModelHabits, Reading, reading_of
from kvasir.router.openai.routing import routed_requests
from kvasir.router.openai.sampling import text_rules_of
from kvasir.router.openai.serving import Endpoint, Serving
from kvasir.router.openai.stream_notes import StreamOrigin
from kvasir.router.openai.structured import checked, with_grammar
from kvasir.router.tenants.backend import TenantBackend
from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits


class OpenAIApi:
    def __init__(
        self,
        backend: TenantBackend,
        tokenizer: TextTokenizer,
        renderer: ChatRenderer,
        *,
        model_names: Sequence[str],
        serving: Serving,
        max_logprobs: int,
        habits: ModelHabits,
        grammars: GrammarChecker,
        created: int,
    ) -> None:
        """`created`: when the model was, in seconds since 1970, as every process of every router says it."""
        self.serving = serving
        self._backend = backend
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._habits = habits
        self._grammars = grammars
        self.model_names = tuple(model_names)
        self._max_logprobs = max_logprobs
        self._created = created

    async def completions(self, request: Request) -> Response:
        endpoint = Endpoint("completions", CompletionBody, "cmpl-", self._prepare_completion)
        return await self.serving.serve(request, endpoint)

    async def chat_completions(self, request: Request) -> Response:
        endpoint = Endpoint("chat/completions", ChatBody, "chatcmpl-", self._prepare_chat)
        return await self.serving.serve(request, endpoint)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.model_names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.model_names:
            raise ModelNotFound(name)
        return json_response(self._card(name))

    async def _prepare_completion(
        self, body: CompletionBody, record: RequestRecord, origin: StreamOrigin
    ) -> tuple[ChoicesAnswer, Begun]:
        limits = self._check(body, "logprobs")
        if body.max_tokens == 0 and not body.echo:
            raise InvalidRequest("'max_tokens' of 0 wants 'echo' to be true", "max_tokens", "invalid_value")
        check_best_of(body)
        prompts = await completion_prompts(body, self.tokenizer, limits)
        shape = CompletionShape(body, prompts, self.tokenizer)
        begun = await self._begin(body, record, limits, prompts, origin)
        return ChoicesAnswer(begun.envelope, shape), begun

    async def _prepare_chat(
        self, body: ChatBody, record: RequestRecord, origin: StreamOrigin
    ) -> tuple[ChoicesAnswer, Begun]:
        prompt, begun = await self.begin_chat(body, record, origin)
        return ChoicesAnswer(begun.envelope, ChatShape(body, prompt, self.tokenizer)), begun

    async def begin_chat(self, body: ChatBody, record: RequestRecord, origin: StreamOrigin) -> tuple[Prompt, Begun]:
        """The answer to a conversation, in whatever shape it is then sent."""
        prompt, reading, limits = await self.chat_prompt(body)
        return prompt, await self._begin(body, record, limits, [prompt], origin, reading)

    async def chat_prompt(self, body: ChatBody) -> tuple[Prompt, Reading, ClusterLimits]:
        limits = self._check(body, "top_logprobs")
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("'top_logprobs' wants 'logprobs' to be true", "top_logprobs", "invalid_value")
        reading = reading_of(body, self._habits)
        prompt = await chat_prompt(body, self._renderer, self.tokenizer, limits, reading.plan.shown)
        return prompt, reading, limits

    def _check(self, body: GenerationBody, logprobs_param: str) -> ClusterLimits:
        """What needs no tokenizer; the limits for what needs one."""
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

    async def _begin(
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
        readers: Sequence[AnswerReader | None] = [None] * (num_sequences * len(prompts))
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
