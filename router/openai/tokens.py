"""POST /tokenize and /detokenize: what the model sees of a text, in vLLM's shapes."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from kvasir.router.openai.bodies import Bodies
from kvasir.router.openai.client_gone import unless_gone
from kvasir.router.openai.conversation import rendered_chat
from kvasir.router.openai.errors import ModelNotFound, json_response
from kvasir.router.openai.models import Body, ConversationBody, TokenIds
from kvasir.router.openai.parsing import validated
from kvasir.router.openai.sampling import check_ids, context_length_exceeded, max_prompt_tokens
from kvasir.router.openai.tools import shown_tools
from kvasir.router.text.chat_renderer import ChatRenderer
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import Backend

_MAX_IDS = 1 << 20


class TokenizeTextBody(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ConversationBody):
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=_MAX_IDS, fail_fast=True)]


class TokensApi:
    def __init__(
        self,
        backend: Backend,
        tokenizer: TextTokenizer,
        renderer: ChatRenderer,
        *,
        model_names: Sequence[str],
        bodies: Bodies,
    ) -> None:
        self._bodies = bodies
        self._backend = backend
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._model_names = tuple(model_names)

    async def tokenize(self, request: Request) -> Response:
        return await self._serve(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._serve(request, self._detokenize)

    async def _serve(
        self, request: Request, answer: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
    ) -> Response:
        fields = await self._bodies.json_object(await self._bodies.arrived(request))
        return json_response(await unless_gone(request.receive, answer(fields)))

    async def _tokenize(self, fields: dict[str, Any]) -> dict[str, Any]:
        body: TokenizeTextBody | TokenizeChatBody
        if "messages" in fields:
            body = validated(fields, TokenizeChatBody)
            text, _ = await rendered_chat(body, self._renderer, shown_tools(body.tools or ()))
            add_special_tokens, param = body.add_special_tokens or False, "messages"
        else:
            body = validated(fields, TokenizeTextBody)
            text, add_special_tokens, param = body.prompt, body.add_special_tokens is not False, "prompt"
        self._check_model(body.model)
        limits = self._backend.limits()
        if self._tokenizer.must_exceed(text, max_prompt_tokens(limits)):
            raise context_length_exceeded(limits, param, f"the text has {len(text)} characters")
        token_ids = await self._tokenizer.encode_off_loop(text, add_special_tokens=add_special_tokens)
        return {
            "count": len(token_ids),
            "max_model_len": limits.max_model_len,
            "tokens": token_ids,
            "token_strs": [self._tokenizer.name_of(one) for one in token_ids] if body.return_token_strs else None,
        }

    async def _detokenize(self, fields: dict[str, Any]) -> dict[str, Any]:
        body = validated(fields, DetokenizeBody)
        self._check_model(body.model)
        check_ids(body.tokens, self._backend.limits(), "tokens")
        return {"prompt": await asyncio.to_thread(self._tokenizer.decode, body.tokens)}

    def _check_model(self, name: str | None) -> None:
        """Naming one is optional here."""
        if name is not None and name not in self._model_names:
            raise ModelNotFound(name)
