"""One connection to a Redis-compatible server. The client library opens it; then we speak the protocol ourselves.

The library would copy values. Ours are large, so they go from and to the caller's memory directly.

A link belongs to one thread at a time; only `cut` may be called from another. A server's refusal is an answer like any
other. Any other error closes the link: with a reply still unread, it would hand that reply to the next question.

No error message repeats what the server says, except the kind of a refusal, since it may quote what was sent to it.
"""

import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.descriptors import write_all

_SCRATCH_BYTES = 64 << 10
_MAX_LINE_BYTES = 4096
_SERVERS_MAX_VALUE_BYTES = 512 << 20
_END = b"\r\n"
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_KIND = re.compile(rb"[A-Z]{2,24}(?= |$)")

Part = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server's error reply, by its kind: OOM, READONLY, MISCONF, WRONGTYPE, NOPERM, LOADING, ..."""

    kind: str


class RedisLink:
    def __init__(self, connection: Any, timeout_s: float) -> None:
        """connection: the client library's, not connected yet. timeout_s: how long the server may make no progress.

        Raises KVTransferError if it cannot connect.
        """
        try:
            connection.connect()
            is_silent = not connection.can_read(timeout=0)
        except (RedisError, OSError) as error:
            connection.disconnect()
            # `from None`: the library's own errors hold what the server said.
            raise KVTransferError(f"no connection to Redis: {_described(error)}") from None
        if not is_silent:
            connection.disconnect()
            raise KVTransferError("no connection to Redis: it speaks without being asked")
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._is_plain = not isinstance(self._socket, ssl.SSLSocket)
        if self._is_plain:
            _let_the_kernel_wait(self._socket, timeout_s)
        else:
            self._socket.settimeout(timeout_s)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._unread = self._scratch[:0]  # never more than a line
        self._lock = threading.Lock()
        self.is_closed = False

    # Asking.

    def send(self, *parts: Part) -> None:
        """Send all of it. The parts are not read any more when this returns or raises."""
        try:
            if self._is_plain:
                write_all(self._socket.fileno(), [memoryview(part) for part in parts])
            else:
                for part in _joined(parts):
                    self._socket.sendall(part)
        except OSError as error:
            raise self._broken(error) from None

    # Answers, in the order of the questions.

    def read_number(self) -> int | Refusal:
        """The reply to a command that answers with a number, or with OK, which counts as 1."""
        kind, rest = self._head()
        if kind == b"-":
            return _refusal(rest)
        if kind == b"+":
            return 1
        return self._number(rest) if kind == b":" else self._foreign()

    def read_value(self, into: memoryview) -> int | Refusal | None:
        """Read a value. Returns how many bytes of `into` it fills; None if there is no value; 0 if it does not fit."""
        kind, rest = self._head()
        if kind == b"-":
            return _refusal(rest)
        if kind == b"_":
            return None
        size = self._number(rest) if kind == b"$" else self._foreign()
        if size == -1:
            return None
        if not 0 <= size <= _SERVERS_MAX_VALUE_BYTES:
            self._foreign()
        if size > into.nbytes:
            self._skip(size)
            size = 0
        else:
            self._fill(into[:size])
        if self._line():
            self._foreign()
        return size

    # Its end.

    @property
    def is_idle(self) -> bool:
        """Whether it can be asked: nothing is waiting to be read, not even the end of the connection."""
        if self.is_closed or self._unread:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def cut(self) -> None:
        """Make a call that is under way fail at once. May be called from any thread."""
        with self._lock:
            if not self.is_closed:
                with suppress(OSError):  # the server has ended it already
                    socket.socket.shutdown(
                        self._socket, socket.SHUT_RDWR
                    )  # the plain socket's: TLS would wait for the peer

    def close(self) -> None:
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._connection.disconnect()

    # Bytes.

    def _head(self) -> tuple[bytes, bytes]:
        line = self._line()
        return line[:1], line[1:]

    def _line(self) -> bytes:
        while True:
            text = bytes(self._unread)
            end = text.find(_END)
            if end >= 0:
                self._unread = self._unread[end + len(_END) :]
                return text[:end]
            if len(text) == _MAX_LINE_BYTES:
                self._foreign()
            self._scratch[: len(text)] = text
            num_bytes = len(text) + self._receive(self._scratch[len(text) : _MAX_LINE_BYTES])
            self._unread = self._scratch[:num_bytes]

    def _fill(self, into: memoryview) -> None:
        num_bytes = min(into.nbytes, self._unread.nbytes)
        into[:num_bytes] = self._unread[:num_bytes]
        self._unread = self._unread[num_bytes:]
        while num_bytes < into.nbytes:
            num_bytes += self._receive(into[num_bytes:], socket.MSG_WAITALL if self._is_plain else 0)

    def _skip(self, num_bytes: int) -> None:
        num_unread = min(num_bytes, self._unread.nbytes)
        self._unread = self._unread[num_unread:]
        num_bytes -= num_unread
        while num_bytes:
            num_bytes -= self._receive(self._scratch[:num_bytes])

    def _receive(self, into: memoryview, flags: int = 0) -> int:
        try:
            num_bytes = self._socket.recv_into(into, 0, flags)
        except OSError as error:
            raise self._broken(error) from None
        if num_bytes == 0:
            raise self._broken(ConnectionResetError("closed by the server"))
        return num_bytes

    def _number(self, text: bytes) -> int:
        return int(text) if _NUMBER.fullmatch(text) else self._foreign()

    def _foreign(self) -> Any:
        self.close()
        raise KVTransferError("Redis: the answer is not of its protocol")

    def _broken(self, error: OSError) -> KVTransferError:
        self.close()
        if isinstance(error, BlockingIOError):
            error = TimeoutError("timed out")
        return KVTransferError(f"Redis: {_described(error)}")


def _let_the_kernel_wait(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernel enforce the timeout, so that one call moves a whole value. With a timeout of its own, Python makes
    two system calls for each part that arrives or leaves."""
    sock.settimeout(None)
    seconds, microseconds = divmod(max(1, round(timeout_s * 1e6)), 1_000_000)  # zero would mean no timeout
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("@ll", seconds, microseconds))


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join small neighbours, so that each does not become a packet of its own."""
    joined: list[Part] = []
    for part in parts:
        if joined and isinstance(joined[-1], bytes) and len(part) < _MAX_LINE_BYTES:
            joined[-1] += bytes(part)
        else:
            joined.append(part)
    return joined


def _refusal(text: bytes) -> Refusal:
    kind = _KIND.match(text)
    return Refusal(kind[0].decode() if kind else "an error")


def _described(error: Exception) -> str:
    """Without the server's own words, which may quote a password."""
    if type(error) in (RedisConnectionError, RedisTimeoutError) or isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
