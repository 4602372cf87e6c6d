"""What the router says in a session: commands, numbered, kept until the node says that they arrived."""

from collections import deque
from collections.abc import Callable

from kvasir.common.grpc_options import MAX_MESSAGE_BYTES
from kvasir.router import wire

Send = Callable[[bytes], None]


class Commands:
    """Of one session, over all of its streams."""

    def __init__(self) -> None:
        self._last_number = 0
        self._unconfirmed: deque[wire.Command] = deque()
        self._send: Send | None = None  # of the stream that there is now

    @property
    def all_confirmed(self) -> bool:
        return not self._unconfirmed

    def add(self, command: wire.Command) -> bool:
        """False: it is too long for any stream, and as if it had never been."""
        command.number = self._last_number + 1
        message = command.SerializeToString()
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        self._last_number += 1
        self._unconfirmed.append(command)
        if self._send is not None:
            self._send(message)
        return True

    def send_aside(self, command: wire.Command) -> None:
        """Without a number, and on a stream that there is now, or never."""
        if self._send is not None:
            self._send(command.SerializeToString())

    def confirm(self, last_number: int) -> None:
        """The node has them up to this one."""
        while self._unconfirmed and self._unconfirmed[0].number <= last_number:
            self._unconfirmed.popleft()

    def begin_stream(self, send: Send, last_number: int) -> None:
        """A new one, to a node that has them up to this one: those behind it are sent again."""
        self.confirm(last_number)
        self._send = send
        for command in self._unconfirmed:
            send(command.SerializeToString())

    def end_stream(self) -> None:
        """What is added from now on waits for the next."""
        self._send = None

    def clear(self) -> None:
        self._unconfirmed.clear()
