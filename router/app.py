"""The routes of the router. What they do is elsewhere."""

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvasir import __version__
from kvasir.router.auth import ApiKeys
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

    app.add_route("/v1/completions", api.completions, methods=["POST"])
    app.add_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    app.add_route("/v1/responses", responses.create, methods=["POST"])
    app.add_route("/v1/responses/input_tokens", responses.input_tokens, methods=["POST"])
    app.add_route("/v1/responses/{response_id}", responses.one, methods=["GET", "DELETE"])
    app.add_route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"])
    app.add_route("/v1/responses/{response_id}/input_items", responses.input_items, methods=["GET"])
    app.add_route("/tokenize", tokens.tokenize, methods=["POST"])
    app.add_route("/detokenize", tokens.detokenize, methods=["POST"])
    app.add_route("/v1/models", api.models, methods=["GET"])
    app.add_route("/v1/models/{name:path}", api.model, methods=["GET"])

    document = openapi_document(api.model_names)

    async def health(request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(request: Request) -> Response:
        """`?prefill=2&decode=3`: and when so many nodes have joined, and a canary has gone through them."""
        try:
            num_prefill, num_decode = (int(request.query_params.get(role, 0)) for role in ("prefill", "decode"))
            if min(num_prefill, num_decode) < 0:
                raise ValueError
        except ValueError:
            raise HttpError(400, "prefill and decode are numbers of nodes") from None
        reason = await overview.why_not_ready(num_prefill, num_decode)
        if not reason:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "reason": reason}, 503, {"retry-after": "1"})

    async def load(request: Request) -> Response:
        return json_response({"server_load": await overview.load()})

    async def openapi(request: Request) -> Response:
        return json_response(document)

    async def docs(request: Request) -> Response:
        return Response(docs_page(document), headers={"content-type": "text/html; charset=utf-8"})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def show_metrics(request: Request) -> Response:
        text = await overview.metrics()
        if isolates_tenants:
            text = visible_metrics(text, current_tenant.get())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    app.add_route("/health", health, methods=["GET"])
    app.add_route("/ready", ready, methods=["GET"])
    app.add_route("/version", version, methods=["GET"])
    app.add_route("/load", load, methods=["GET"])
    app.add_route("/openapi.json", openapi, methods=["GET"])
    app.add_route("/docs", docs, methods=["GET"])
    app.add_route("/metrics", show_metrics, methods=["GET"])
    return app


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own refusals in our words."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        raise no_route(request.method, request.url.path)
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        raise HttpError(405, message, "method_not_allowed", error.headers)
    raise HttpError(error.status_code, str(error.detail), headers=error.headers)
