"""Connections that change hands between two ends in one process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvasir.router.http_server import bound_socket
from kvasir.router.workers.door import Door, Inbox, hand_over
from tests.waiting import until


async def greet(connection: socket.socket) -> None:
    """What a worker does with it."""
    await asyncio.get_running_loop().sock_sendall(connection, b"hello")
    connection.close()


@asynccontextmanager
async def open_door(hand: Callable[[socket.socket], bool]) -> AsyncIterator[int]:
    listener = bound_socket("127.0.0.1", 0)
    port = int(listener.getsockname()[1])
    door = Door(listener, hand)
    door.open()
    try:
        yield port
    finally:
        door.close()


async def ask(port: int) -> bytes:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


async def test_connections_go_to_workers_and_wait_while_there_is_none() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    is_up, num_refused = False, 0

    def hand(connection: socket.socket) -> bool:
        nonlocal num_refused
        num_refused += not is_up
        return is_up and hand_over(ours, connection)

    inbox = Inbox(theirs, greet, lambda: None)
    async with open_door(hand) as port:
        asking = [asyncio.create_task(ask(port)) for _ in range(100)]
        await until(lambda: num_refused >= 2)
        assert not any(task.done() for task in asking)
        is_up = True
        assert await asyncio.gather(*asking) == [b"hello"] * 100
    await inbox.close()
    ours.close()
    theirs.close()


async def test_a_worker_knows_that_its_parent_is_gone_and_a_parent_that_its_worker_is() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone: list[bool] = []
    inbox = Inbox(theirs, greet, lambda: gone.append(True))
    ours.close()
    await until(lambda: bool(gone))
    await inbox.close()
    assert gone == [True]
    theirs.close()

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with socket.socket() as connection:
        assert not hand_over(ours, connection)
    ours.close()
