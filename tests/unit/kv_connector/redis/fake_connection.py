"""A connection of the Redis client library, as far as a link knows it, whose server is a test."""

import socket
import threading
from typing import Self


class FakeConnection:
    def __init__(self) -> None:
        self._sock, self.server = socket.socketpair()
        self.server.settimeout(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()
        self.server.close()

    def connect(self) -> None: ...

    def can_read(self, timeout: float) -> bool:
        return False

    def disconnect(self) -> None:
        self._sock.close()

    def answer_and_close(self, data: bytes) -> None:
        """What a socket holds at once. Whatever is asked of it is lost."""
        self.server.sendall(data)
        self.server.shutdown(socket.SHUT_WR)

    def answer(self, data: bytes, at_once: int = 1 << 20) -> None:
        """And close, from a thread: it may be more than a socket holds."""

        def run() -> None:
            with self.server:
                for start in range(0, len(data), at_once):
                    try:
                        self.server.sendall(data[start : start + at_once])
                    except OSError:
                        return

        threading.Thread(target=run, daemon=True).start()
