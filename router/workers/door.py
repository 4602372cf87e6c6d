"""Connections: the parent accepts them, and hands each to a worker as it is.

So the workers get equal shares, and while no worker is there clients wait. What a worker was handed is lost with it.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_BACKLOG = 2048
_MANY = 64  # accepted in one turn
_AGAIN_AFTER_S = 0.05


class Door:
    """`hand` gives a connection away; False if nobody can take it now."""

    def __init__(self, listener: socket.socket, hand: Callable[[socket.socket], bool]) -> None:
        self._listener = listener
        self._hand = hand
        self._waiting: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._watch()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting is not None:
            self._waiting.close()
        self._listener.close()

    def _watch(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MANY):
            try:
                connection = self._waiting or self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:  # the client has left already, or we have no file descriptors left
                log.warning("cannot accept a connection: %s", error)
                self._pause()
                return
            if not self._hand(connection):
                self._waiting = connection
                self._pause()
                return
            self._waiting = None
            connection.close()  # our copy

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._timer = loop.call_later(_AGAIN_AFTER_S, self._resume)

    def _resume(self) -> None:
        self._watch()
        self._accept()


class Inbox:
    """The worker's end: connections as they come, until the parent is gone."""

    def __init__(
        self,
        control: socket.socket,
        adopt: Callable[[socket.socket], Awaitable[None]],
        on_parent_gone: Callable[[], None],
    ) -> None:
        self._control = control
        self._adopt = adopt
        self._on_parent_gone = on_parent_gone
        self._adopting: set[asyncio.Task[None]] = set()
        self._has_ended = False
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._take)

    async def close(self) -> None:
        """All that has been handed over is taken."""
        self._take()
        asyncio.get_running_loop().remove_reader(self._control)
        await asyncio.gather(*self._adopting, return_exceptions=True)

    def _take(self) -> None:
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                message, descriptors = b"", []
            if not message:
                asyncio.get_running_loop().remove_reader(self._control)
                if not self._has_ended:
                    self._has_ended = True
                    self._on_parent_gone()
                return
            for descriptor in descriptors:
                task = asyncio.ensure_future(self._serve(socket.socket(fileno=descriptor)))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._adopt(connection)
        except OSError as error:  # it has ended meanwhile
            log.debug("a connection ended before it was served: %s", error)
            connection.close()


def hand_over(control: socket.socket, connection: socket.socket) -> bool:
    """False if the worker is gone, or does not take any."""
    try:
        socket.send_fds(control, [b"c"], [connection.fileno()])
    except OSError:
        return False
    return True
