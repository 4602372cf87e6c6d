"""Ports that stay a test's own."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kvasir.cli.ports import free_port


@contextmanager
def held_port() -> Iterator[int]:
    """Nobody else is given it, also not while the server that the test has there is down.

    A socket has it that does not listen. Linux lets a server listen there beside it if both want to reuse the address,
    as the servers in our tests all do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", free_port()))
        yield int(holder.getsockname()[1])
