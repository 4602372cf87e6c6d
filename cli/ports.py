"""Free ports, and whether one is taken."""

import random
import socket
from contextlib import ExitStack

# Below the range from which the kernel takes the ports of outgoing connections, so none of those gets in between.
_RANGE = range(20_000, 32_000)
_MAX_TRIES = 1000


class NoFreePort(Exception):
    pass


def free_ports(count: int) -> tuple[int, ...]:
    """That many different ones, free on loopback a moment ago."""
    found: list[int] = []
    with ExitStack() as held:  # all at once, so that none is found twice
        for port in random.sample(_RANGE, k=_MAX_TRIES):
            if len(found) == count:
                break
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    if len(found) < count:
        raise NoFreePort(f"found only {len(found)} of {count} free ports between {_RANGE.start} and {_RANGE.stop}")
    return tuple(found)


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def why_not_bindable(host: str, port: int) -> str | None:
    """None if a server could listen there; else what the system says."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None
