"""A ZeroMQ socket on the event loop: each message is handed to a function, without a task or a future of its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

_MESSAGES_A_TURN = 16  # then it is the event loop's turn
_POLLIN = int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # an enum's arithmetic costs as much as a call


class LoopSocket:
    """Takes the socket over: reads it from now on, and closes it."""

    def __init__(self, socket: "zmq.Socket[Any]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._socket.copy_threshold = 0  # a lent frame is never copied, however small: what is on its way is counted
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._next_look: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._read)
        self.look()

    def send(self, *frames: bytes | memoryview) -> None:
        """One message. A memoryview in it is lent, not copied: that very object is kept for as long as the socket reads
        what it shows, so that a weak reference to it tells when that is over.

        Raises zmq.ZMQError instead of waiting: what does not fit now is not sent, and nothing of it is lent.
        """
        self.look()  # whether it can be sent or not: trying may come across news
        for left, frame in enumerate(frames, 1 - len(frames)):
            self._socket.send(frame, _MORE if left else _NOBLOCK, copy=isinstance(frame, bytes))

    def look(self) -> None:
        """Soon. A socket's descriptor tells of news once only, and not if a call has come across them in passing."""
        if self._next_look is None and not self._socket.closed:
            self._next_look = self._loop.call_soon(self._read)

    def drain(self) -> None:
        """Hand over at once what has come; for a connection by which nothing more can."""
        while self._read_one():
            pass

    def close(self) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._next_look is not None:
            self._next_look.cancel()
        self._socket.close(linger=0)

    def _read(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        for _ in range(_MESSAGES_A_TURN):
            if not self._read_one():
                return
        self.look()

    def _read_one(self) -> bool:
        if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & _POLLIN:
            return False
        message = [self._socket.recv(_NOBLOCK, copy=False)]
        while message[-1].more:  # a message comes whole, or not at all
            message.append(self._socket.recv(_NOBLOCK, copy=False))
        self._on_message(message)
        return True
