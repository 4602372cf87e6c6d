"""The endpoints under /v1/responses."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvasir.common.errors import InvalidRequest
from kvasir.router.metrics import RequestRecord
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.begun import Begun
from kvasir.router.openai.errors import HttpError, StoreUnavailable, json_response, log_fault
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.responses.items import ChatMessage, Item, check_outputs, input_items, messages_of
from kvasir.router.openai.responses.outputs import Event
from kvasir.router.openai.responses.references import as_shown, with_referenced
from kvasir.router.openai.responses.store import ResponseStore, StoredResponse
from kvasir.router.openai.responses.truncation import asked_with_what_fits
from kvasir.router.openai.responses.writer import ResponseWriter
from kvasir.router.openai.serving import Endpoint
from kvasir.router.openai.sse import event
from kvasir.router.openai.stream_notes import StreamOrigin
from kvasir.router.tenants.tenant import current_tenant

log = logging.getLogger(__name__)
_MAX_PAGE = 100


class ResponseAnswer:
    """Whole or in events; stored before the client is told that it is complete."""

    num_openings = 2  # created, in progress

    def __init__(self, writer: ResponseWriter, kept: "Kept | None") -> None:
        self._writer = writer
        self._kept = kept

    @property
    def response_id(self) -> str:
        return str(self._writer.response["id"])

    async def whole(self, deltas: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        self._writer.begin()
        async for delta in deltas:
            self._writer.take(delta)
        self._writer.end()
        await self._keep()
        return self._writer.response

    async def events(self, deltas: AsyncIterator[ChoiceDelta]) -> AsyncGenerator[bytes, None]:
        """No [DONE]: the last event says itself that it is the last."""
        for told in self._writer.begin():
            yield _sse(told)
        try:
            async for delta in deltas:
                for one in self.events_of(delta):
                    yield one
        except Exception as error:
            log_fault(error)
            for told in self._writer.fail(error):
                yield _sse(told)
            return
        await self._keep()
        for told in self._writer.end():
            yield _sse(told)

    def events_of(self, delta: ChoiceDelta) -> list[bytes]:
        return [_sse(told) for told in self._writer.take(delta)]

    async def _keep(self) -> None:
        if self._kept is not None:
            await self._kept.put(self._writer.response)


class Kept:
    """Where a response goes when it is complete, and what it goes on from."""

    def __init__(self, store: ResponseStore, owner: str, input_items: list[Item], messages: list[ChatMessage]) -> None:
        self._store = store
        self._owner = owner
        self._input_items = input_items
        self._messages = messages

    async def put(self, response: dict[str, Any]) -> None:
        """A store that does not answer costs the client its way back, not its answer."""
        messages = [*self._messages, *messages_of(response["output"])]
        try:
            await self._store.put(self._owner, StoredResponse.of(response, self._input_items, messages))
        except StoreUnavailable as error:
            log.warning("response %s is not stored: %s", response["id"], error)


class ResponsesApi:
    def __init__(self, api: OpenAIApi, store: ResponseStore) -> None:
        self._api = api
        self._store = store

    async def create(self, request: Request) -> Response:
        prepare = partial(self._prepare, current_tenant.get().owner)
        return await self._api.serving.serve(request, Endpoint("responses", ResponsesBody, "resp_", prepare))

    async def input_tokens(self, request: Request) -> Response:
        """How long the prompt of such a request is."""
        body = await self._api.serving.body_of(request, ResponsesBody)
        _, messages = await self._read(current_tenant.get().owner, body)
        _, (prompt, _, _) = await asked_with_what_fits(self._api, body, messages, self._api.chat_prompt)
        return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})

    async def one(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        if request.method == "DELETE":
            if not await self._store.delete(current_tenant.get().owner, response_id):
                raise _not_found(response_id)
            return json_response({"id": response_id, "object": "response.deleted", "deleted": True})
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise _unsupported("stream", "a stored response is not streamed again")
        return json_response((await self._stored(response_id)).response)

    async def input_items(self, request: Request) -> Response:
        stored = await self._stored(request.path_params["response_id"])
        return json_response(_list_of(stored.input_items, request.query_params))

    async def cancel(self, request: Request) -> Response:
        """Only what runs in the background outlives its connection, and nothing here does."""
        await self._stored(request.path_params["response_id"])
        message = "only a response that was made with 'background' can be cancelled"
        raise InvalidRequest(message, "response_id", "invalid_value")

    async def _stored(self, response_id: str) -> StoredResponse:
        stored = await self._store.get(current_tenant.get().owner, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored

    async def _prepare(
        self, owner: str, body: ResponsesBody, record: RequestRecord, origin: StreamOrigin
    ) -> tuple[ResponseAnswer, Begun]:
        items, messages = await self._read(owner, body)
        messages, (_, begun) = await asked_with_what_fits(
            self._api, body, messages, lambda chat: self._api.begin_chat(chat, record, origin)
        )
        kept = None if body.store is False else Kept(self._store, owner, as_shown(items, origin.response_id), messages)
        writer = ResponseWriter(body, begun.envelope, self._api.tokenizer)
        return ResponseAnswer(writer, kept), begun

    async def _read(self, owner: str, body: ResponsesBody) -> tuple[list[Item], list[ChatMessage]]:
        """Its items, and the conversation with them."""
        _check_supported(body)
        items = await with_referenced(input_items(body.input), self._store, owner)
        _check_depth(body, items)
        messages = [*await self._history(owner, body.previous_response_id), *messages_of(items)]
        check_outputs(messages)
        return items, messages

    async def _history(self, owner: str, previous_response_id: str | None) -> list[ChatMessage]:
        if previous_response_id is None:
            return []
        stored = await self._store.get(owner, previous_response_id)
        if stored is None:
            message = f"previous response with id {previous_response_id[:80]!r} not found"
            raise InvalidRequest(message, "previous_response_id", "previous_response_not_found")
        return stored.messages


def _sse(told: Event) -> bytes:
    return event(told, told["type"])


def _list_of(items: list[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of them, behind the item `after`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' must be asc or desc, got {order!r:.40}", "order", "invalid_value")
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequest(f"'limit' must be 1 to {_MAX_PAGE}, got {limit!r:.40}", "limit", "invalid_value")
    left = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(left) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"'after': there is no item {after!r:.80}", "after", "invalid_value")
        left = left[places[0] + 1 :]
    data = left[: int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(data) < len(left),
    }


def _check_supported(body: ResponsesBody) -> None:
    for name in ("background", "conversation", "prompt", "prompt_logprobs", "return_token_ids"):
        if (value := getattr(body, name)) is not None and value is not False:
            raise _unsupported(name, f"'{name}' is not supported")
    if body.num_choices > 1:
        raise _unsupported("n", "a response has one output: 'n' can only be 1")


def _check_depth(body: ResponsesBody, items: list[Item]) -> None:
    """What is said or stored again must not be deeper than JSON is written here."""
    again = [items, [tool.parameters for tool in body.tools or ()], body.text and body.text.format]
    try:
        orjson.dumps([[again]])
    except TypeError as error:
        raise InvalidRequest(f"the request is nested too deeply: {error}", "input", "invalid_value") from None


def _not_found(response_id: str) -> HttpError:
    return HttpError(404, f"response with id {response_id[:80]!r} not found", "response_not_found")


def _unsupported(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param, "unsupported_parameter")
