"""gRPC servers as all of ours are: bounded messages, agreed keepalive, and nobody in without the cluster's secret.

A server on loopback may go without a secret; off loopback it must have one. With a secret, every call is checked,
health and reflection too, but for one case: on loopback these two stay open, so that `grpcurl` and a local probe work.
(Off the machine, probes use the HTTP port.)
"""

from __future__ import annotations  # grpc's classes are generic in their stubs alone

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from kvasir.common.addresses import join_address, split_address, why_not_bindable
from kvasir.common.grpc_options import MAX_MESSAGE_BYTES, SECRET_METADATA_KEY, server_options
from kvasir.common.secrets import is_loopback, same_secret

_OPEN_ON_LOOPBACK = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls that do not carry the secret, before a byte of their messages is parsed."""

    def __init__(self, secret: str, open_methods: tuple[str, ...] = ()) -> None:
        self._secret = secret
        self._open_methods = open_methods  # prefixes of full method names

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        details = cast(Any, handler_call_details)
        given = dict(details.invocation_metadata or ()).get(SECRET_METADATA_KEY)
        if same_secret(given, self._secret) or details.method.startswith(self._open_methods or ("\0",)):
            return await continuation(handler_call_details)
        return _REFUSAL


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret is missing or wrong")


# Stream-stream whatever was called: such a handler answers at once, without waiting for a first message.
_REFUSAL = grpc.stream_stream_rpc_method_handler(cast(Any, _refuse))


def new_server(listen: str, secret: str | None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Server:
    """A server to add servicers to; `bind` gives it its port. ValueError as `check_listen`."""
    check_listen(listen, secret)
    open_methods = _OPEN_ON_LOOPBACK if is_loopback(split_address(listen)[0]) else ()
    interceptors = [] if secret is None else [SecretInterceptor(secret, open_methods)]
    return grpc.aio.server(interceptors=interceptors, options=server_options(max_message_bytes))


def check_listen(listen: str, secret: str | None) -> None:
    """ValueError: off loopback without a secret."""
    if secret is None and not is_loopback(split_address(listen)[0]):
        raise ValueError(f"listening on {listen} wants a cluster secret: only loopback may go without")


def bind(server: grpc.aio.Server, listen: str) -> int:
    """The port that was bound (port 0 asks for any). OSError if somebody else has it."""
    host, port = split_address(listen)
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {why_not_bindable(host, port) or error}") from error
    if bound == 0:
        raise OSError(f"cannot listen on {listen}")
    return bound
