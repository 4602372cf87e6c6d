"""host:port, as people write it and as gRPC wants it, and whether it can be listened on."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def split_address(address: str) -> tuple[str, int]:
    """`127.0.0.1:50051` -> ("127.0.0.1", 50051); `[::1]:0` -> ("::1", 0)"""
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is host:port, got {address!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """("::1", 80) -> `[::1]:80`"""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_not_bindable(host: str, port: int) -> str | None:
    """None if a server could listen there, at one of the addresses that `host` has; else what the system says."""
    try:
        with listening(host, port):
            return None
    except OSError as error:
        return error.strerror or str(error)


@contextmanager
def listening(host: str, port: int) -> Iterator[None]:
    """Keeps the port from others, at each of the addresses that `host` has. OSError if it can at none of them."""
    refusal = OSError("it has no address")
    with ExitStack() as sockets:
        is_bound = False
        for family, kind, protocol, _, address in _addresses_of(host, port):
            try:
                sock = sockets.enter_context(socket.socket(family, kind, protocol))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.listen(1)
                is_bound = True
            except OSError as error:
                refusal = error
        if not is_bound:
            raise refusal
        yield


def _addresses_of(host: str, port: int) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        if host in (name for _, name in socket.if_nameindex()):
            raise OSError("that is an interface; an address of it is wanted, or 0.0.0.0 for all") from error
        raise OSError(getattr(error, "strerror", None) or "it is no name of a host") from error
