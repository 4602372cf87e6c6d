"""A ZeroMQ socket on the event loop: each message goes straight to a function, without a task or future of its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

_MESSAGES_A_TURN = 16  # read before the event loop may do other work
_POLLIN = int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of zmq's enums costs as much as a call


class LoopSocket:
    """Owns the socket from now on: reads it, and closes it."""

    def __init__(self, socket: "zmq.Socket[Any]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._socket.copy_threshold = 0  # zmq would copy small frames, and their loans would end at once
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._next_look: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._read)
        self.look()

    def send(self, *frames: bytes | memoryview) -> None:
        """Send one message. A memoryview is lent, not copied: the socket holds that very object for as long as it reads
        the memory, so a weak reference to it tells when the loan is over.

        Raises zmq.ZMQError instead of waiting; then nothing was sent and nothing is lent.
        """
        self.look()  # trying to send may swallow the notice that something has arrived
        for left, frame in enumerate(frames, 1 - len(frames)):
            self._socket.send(frame, _MORE if left else _NOBLOCK, copy=isinstance(frame, bytes))

    def look(self) -> None:
        """Read soon. The descriptor signals an arrival once, and not at all if another call has noticed it first."""
        if self._next_look is None and not self._socket.closed:
            self._next_look = self._loop.call_soon(self._read)

    def drain(self) -> None:
        """Hand over at once everything that has arrived, for a connection that has ended."""
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
