"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a status they know."""

import logging
import math
import reprlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvasir.common.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    KVTransferError,
    NodeUnavailable,
    NumericalError,
    Overloaded,
    ServingError,
)
from kvasir.router.openai.client_gone import ClientGone

CLIENT_LEFT = (ClientDisconnect, ClientGone)
_CLIENT_CLOSED_REQUEST = 499  # nobody is there to read it

# Of the HTTP request that is served in this context.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")

log = logging.getLogger(__name__)


class StoreUnavailable(ServingError):
    """What was kept for clients cannot be had now."""


# Status, type, code. Looked up along the class order, so that a subclass is never lost.
STATUS: dict[type[ServingError], tuple[int, str, str | None]] = {
    InvalidRequest: (400, "invalid_request_error", None),
    Overloaded: (503, "service_unavailable", "overloaded"),
    Draining: (503, "service_unavailable", "draining"),
    DeadlineExceeded: (504, "timeout", "deadline_exceeded"),
    NodeUnavailable: (503, "service_unavailable", "no_node_available"),
    KVTransferError: (503, "service_unavailable", "transfer_failed"),
    StoreUnavailable: (503, "service_unavailable", "store_unavailable"),
    NumericalError: (500, "server_error", "numerical_error"),
    EngineDead: (503, "service_unavailable", "engine_dead"),
    ServingError: (500, "server_error", None),
}


class HttpError(Exception):
    """A fault in the request that is not about its fields: key, route, method, size, how often."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})


class NotFound(InvalidRequest):
    """Something that the request names is not there."""


def missing(param: str) -> InvalidRequest:
    return InvalidRequest(f"you must provide '{param}'", param, "missing_required_parameter")


def wrong_type(param: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}' must be {wanted}", param, "invalid_type")


class ModelNotFound(NotFound):
    def __init__(self, name: str) -> None:
        super().__init__(f"the model {reprlib.repr(name)} does not exist", "model", "model_not_found")


class StreamNotKept(HttpError):
    def __init__(self) -> None:
        super().__init__(404, "this stream is not kept (any more)", "stream_not_found")


def no_route(method: str, path: str) -> HttpError:
    return HttpError(404, f"there is no {method} {path}", "unknown_route")


def error_body(error: Exception) -> dict[str, Any]:
    """Says nothing about the inside where the error is none that we know."""
    if isinstance(error, HttpError):
        return _body(str(error), error.kind, None, error.code)
    if isinstance(error, ServingError):
        _, kind, code = _entry(error)
        if isinstance(error, InvalidRequest):
            return _body(str(error), kind, error.param, error.code)
        return _body(str(error), kind, None, code)
    return _body("the server failed; the request id leads to its log", "server_error", None, "internal_error")


def status_of(error: Exception) -> int:
    if isinstance(error, HttpError):
        return error.status
    if isinstance(error, NotFound):
        return 404
    return _entry(error)[0] if isinstance(error, ServingError) else 500


def log_fault(error: Exception) -> None:
    """If it is one of our own."""
    if status_of(error) == 500:
        log.error("request %s failed: %r", current_request_id.get(), error, exc_info=error)


def error_response(error: Exception) -> Response:
    """What whoever is around all endpoints makes of what they raise."""
    if isinstance(error, CLIENT_LEFT):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    log_fault(error)
    status = status_of(error)
    headers = error.headers if isinstance(error, HttpError) else {}
    if status == 503:
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        headers = {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return json_response(error_body(error), status, headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, dict(headers or {}), media_type="application/json")


def _entry(error: ServingError) -> tuple[int, str, str | None]:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    message = message.encode(errors="backslashreplace").decode()  # a template's words may be no Unicode
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
