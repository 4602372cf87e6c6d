"""Ports that are free."""

import random
import socket
from itertools import cycle, islice

# Below the range from which the kernel takes the ports of outgoing connections, so none of those gets in between.
_RANGE = range(20_000, 32_000)
_MAX_TRIES = 1000


class NoFreePort(Exception):
    pass


# Of this process: whoever was given a port has time to listen there before it is given to another.
_next_ones = cycle(random.sample(_RANGE, k=len(_RANGE)))


def free_ports(count: int) -> tuple[int, ...]:
    """That many different ones, free on loopback a moment ago."""
    found = tuple(islice(filter(_is_free, islice(_next_ones, _MAX_TRIES)), count))
    if len(found) < count:
        raise NoFreePort(f"found only {len(found)} of {count} free ports between {_RANGE.start} and {_RANGE.stop}")
    return found


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
