"""What can be asked of the router: every method of every path."""

from dataclasses import dataclass, field
from typing import Any

from kvasir.router.docs import replies as r
from kvasir.router.docs import response_replies as rr
from kvasir.router.openai.models import ChatBody, CompletionBody
from kvasir.router.openai.responses.body import ResponsesBody
from kvasir.router.openai.tokens import DetokenizeBody, TokenizeChatBody, TokenizeTextBody

_GENERATING = (400, 401, 404, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    tag: str
    reply: Any = None  # a model; None: text
    media_type: str = "text/plain"  # of a text
    bodies: tuple[type, ...] = ()  # any of them
    chunk: Any = None  # what each event of a stream holds
    errors: tuple[int, ...] = (401, 500)
    also: dict[int, Any] = field(default_factory=dict)  # other statuses with a model of their own
    query: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> schema
    is_always_refused: bool = False


_ONE_RESPONSE = (400, 401, 404, 500, 503)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Go on with a conversation",
        tag="OpenAI",
        bodies=(ChatBody,),
        reply=r.ChatCompletion,
        chunk=r.ChatChunk,
        errors=_GENERATING,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Go on with a text",
        tag="OpenAI",
        bodies=(CompletionBody,),
        reply=r.Completion,
        chunk=r.CompletionChunk,
        errors=_GENERATING,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer, and remember it",
        tag="OpenAI",
        bodies=(ResponsesBody,),
        reply=rr.ResponseObject,
        chunk=rr.StreamedEvent,
        errors=_GENERATING,
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        summary="How many tokens the prompt of a response has",
        tag="OpenAI",
        bodies=(ResponsesBody,),
        reply=rr.InputTokens,
        errors=(400, 401, 404, 413, 415, 500, 503),
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="A stored response",
        tag="OpenAI",
        reply=rr.ResponseObject,
        errors=_ONE_RESPONSE,
        query={"stream": {"type": "boolean", "default": False}},
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Forget a response",
        tag="OpenAI",
        reply=rr.Deleted,
        errors=_ONE_RESPONSE,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="What a stored response answers",
        tag="OpenAI",
        reply=rr.InputItems,
        errors=_ONE_RESPONSE,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string"},
        },
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="Refused: no response runs in the background",
        tag="OpenAI",
        is_always_refused=True,
        errors=_ONE_RESPONSE,
    ),
    Operation(method="get", path="/v1/models", summary="The models", tag="OpenAI", reply=r.ModelList),
    Operation(
        method="get",
        path="/v1/models/{name}",
        summary="One model",
        tag="OpenAI",
        reply=r.ModelCard,
        errors=(401, 404, 500),
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Token ids of a text or a conversation",
        tag="Tokens",
        bodies=(TokenizeTextBody, TokenizeChatBody),
        reply=r.Tokens,
        errors=(400, 401, 404, 413, 415, 500, 503),
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="The text of token ids",
        tag="Tokens",
        bodies=(DetokenizeBody,),
        reply=r.Detokenized,
        errors=(400, 401, 404, 413, 415, 500, 503),
    ),
    Operation(method="get", path="/health", summary="Alive", tag="Operation", reply=r.Health, errors=()),
    Operation(
        method="get",
        path="/ready",
        summary="A generation has gone through the nodes that are here",
        tag="Operation",
        reply=r.Readiness,
        errors=(400,),
        also={503: r.Readiness},
        query={name: {"type": "integer", "default": 0} for name in ("prefill", "decode")},
    ),
    Operation(method="get", path="/load", summary="Requests that run", tag="Operation", reply=r.Load),
    Operation(method="get", path="/version", summary="Version", tag="Operation", reply=r.Version, errors=()),
    Operation(method="get", path="/metrics", summary="For Prometheus", tag="Operation"),
    Operation(method="get", path="/openapi.json", summary="This document", tag="Operation", reply=dict[str, Any]),
    Operation(method="get", path="/docs", summary="This document, for people", tag="Operation", media_type="text/html"),
    Operation(
        method="get",
        path="/cluster",
        summary="The nodes, and the last minutes' latencies",
        tag="Operation",
        reply=dict[str, Any],
        query={"answer": {"type": "string", "description": "Id of an answer: adds the nodes that gave its tokens."}},
    ),
)
