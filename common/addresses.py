"""host:port, as people write it and as gRPC wants it, and whether it can be listened on."""

import socket


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
    reason = "it has no address"
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind(address)
                    sock.listen(1)
                return None
            except OSError as error:
                reason = error.strerror or str(error)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
    return reason
