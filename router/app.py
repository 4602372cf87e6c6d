"""The routes of the router. What they do is elsewhere, but for what is said of the router itself."""

from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from kvasir import __version__
from kvasir.router.auth import ApiKeys
from kvasir.router.config import RouterConfig
from kvasir.router.docs.openapi import openapi_document
from kvasir.router.docs.page import docs_page
from kvasir.router.guard import Guard
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.api import OpenAIApi
from kvasir.router.openai.errors import HttpError, json_response, no_route
from kvasir.router.openai.responses.api import ResponsesApi
from kvasir.router.openai.tokens import TokensApi
from kvasir.router.overview import Overview
from kvasir.router.tenants.tenant import current_tenant
from kvasir.router.tenants.visible import visible_metrics


def create_app(
    api: OpenAIApi,
    responses: ResponsesApi,
    tokens: TokensApi,
    overview: Overview,
    keys: ApiKeys,
    router_metrics: RouterMetrics,
    *,
    isolates_tenants: bool = False,
) -> FastAPI:
    # Exact routes only: a slash more is another path, and no path is answered by a redirect.
    app = FastAPI(title="Kvasir", version=__version__, redirect_slashes=False, openapi_url=None)
    app.add_middleware(Guard, keys=keys, metrics=router_metrics)
    app.add_exception_handler(HTTPException, _on_http_exception)

    operation = Operation(overview, openapi_document(api.model_names), isolates_tenants=isolates_tenants)
    for methods, path, endpoint in (
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/chat/completions", api.chat_completions),
        ("POST", "/v1/responses", responses.create),
        ("POST", "/v1/responses/input_tokens", responses.input_tokens),
        ("GET DELETE", "/v1/responses/{response_id}", responses.one),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", responses.input_items),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{name:path}", api.model),
        ("GET", "/health", operation.health),
        ("GET", "/ready", operation.ready),
        ("GET", "/version", operation.version),
        ("GET", "/load", operation.load),
        ("GET", "/openapi.json", operation.openapi),
        ("GET", "/docs", operation.docs),
        ("GET", "/metrics", operation.metrics),
    ):
        app.add_route(path, endpoint, methods=methods.split())
    return app


class Operation:
    """What operators and their machines ask."""

    def __init__(self, overview: Overview, document: dict[str, Any], *, isolates_tenants: bool) -> None:
        self._overview = overview
        self._document = document  # of the API
        self._isolates_tenants = isolates_tenants

    async def health(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """`?prefill=2&decode=3`: and when so many nodes have joined, and a canary has gone through them."""
        try:
            num_prefill, num_decode = (int(request.query_params.get(role, 0)) for role in ("prefill", "decode"))
            if min(num_prefill, num_decode) < 0:
                raise ValueError
        except ValueError:
            raise HttpError(400, "prefill and decode are numbers of nodes") from None
        reason = await self._overview.why_not_ready(num_prefill, num_decode)
        if not reason:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "reason": reason}, 503, {"retry-after": "1"})

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": await self._overview.load()})

    async def openapi(self, request: Request) -> Response:
        return json_response(self._document)

    async def docs(self, request: Request) -> Response:
        return Response(docs_page(self._document), headers={"content-type": "text/html; charset=utf-8"})

    async def metrics(self, request: Request) -> Response:
        text = await self._overview.metrics()
        if self._isolates_tenants:
            text = visible_metrics(text, current_tenant.get())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def allow_origins(app: FastAPI, config: RouterConfig) -> None:
    """Which other sites' pages may ask from a browser: none, unless the operator names them.

    A browser asks first whether it may, without a key; so that is answered in front of whatever wants one.
    """
    if not config.allowed_origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=[
            *("x-request-id", "retry-after"),
            *(
                f"x-ratelimit-{said}-{what}"
                for said in ("limit", "remaining", "reset")
                for what in ("requests", "tokens")
            ),
        ],
    )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals in our words."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        raise no_route(request.method, request.url.path)
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        raise HttpError(405, message, "method_not_allowed", error.headers)
    raise HttpError(error.status_code, str(error.detail), headers=error.headers)
