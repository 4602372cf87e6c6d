"""Ports that are free."""

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
