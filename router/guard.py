"""Around everything the app does: request ids, API keys, and an answer to whatever an endpoint raises."""

import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.router.auth import ApiKeys
from kvasir.router.http_chunks import WRITE_CHUNK
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.errors import HttpError, current_request_id, error_response, no_route
from kvasir.router.tenants.tenant import current_standing, current_tenant

_MAX_REQUEST_ID_CHARS = 128
_FOR_PEOPLE = frozenset({"/", "/docs"})


SEND_BODY = "kvasir.send_body"  # in a scope: past all that looks at the start of a response only


class Guard:
    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: RouterMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        current_request_id.set(request_id)
        standing: dict[str, str] = {}
        current_standing.set(standing)
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._metrics.responses(status=str(message["status"]))
                more = [(name.encode(), value.encode()) for name, value in standing.items()]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode()), *more]
            await send(message)

        try:
            tenant = self._keys.tenant(scope["path"], headers)
            if tenant is None:
                raise _unauthorized(scope["path"])
            if scope["path"].endswith("\n"):  # a route's pattern would overlook it, what a proxy refuses would get in
                raise no_route(scope["method"], scope["path"])
            current_tenant.set(tenant)
            scope[SEND_BODY] = send
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:
                raise  # the server cuts the connection: half an answer must not look like a whole one
            await error_response(error)(scope, receive, send_with_id)
        finally:  # they hold what holds the scope: nothing must wait for garbage collection
            scope.pop(SEND_BODY, None)
            scope.pop(WRITE_CHUNK, None)


def _request_id(given: str | None) -> str:
    if given and len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _unauthorized(path: str) -> HttpError:
    """For a page, the browser asks its user: any name, and the key as password."""
    message = "a valid API key is needed, as 'Authorization: Bearer KEY'"
    challenge = 'Basic realm="Kvasir: an API key as the password"' if path in _FOR_PEOPLE else "Bearer"
    return HttpError(401, message, "invalid_api_key", {"www-authenticate": challenge})
