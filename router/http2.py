"""HTTP/2 (RFC 9113) as far as a client with one stream on a connection has to speak it."""

from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM = 1  # the one
WINDOW_BYTES = 65_535  # of the stream and of the connection, until it is said otherwise

END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20  # flags

_MAX_FRAME_BYTES = 16_384  # either way: we never allow more, and never send more
_HEAD = Struct("!HBBBI")  # length in two parts, kind, flags, stream
_SETTING = Struct("!HI")
_UINT31 = (1 << 31) - 1


class Kind(IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    ENABLE_PUSH = 2
    INITIAL_WINDOW_SIZE = 4


class ProtocolError(Exception):
    """The peer does not speak HTTP/2, or not as it must."""


def frame(kind: Kind, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    return b"".join((_HEAD.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream), payload))


def settings(values: dict[Setting, int]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in values.items()))


def parse_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    if len(payload) % _SETTING.size:
        raise ProtocolError(f"settings of {len(payload)} bytes")
    yield from _SETTING.iter_unpack(payload)


def window_update(stream: int, num_bytes: int) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, num_bytes.to_bytes(4))


def parse_uint31(payload: bytes) -> int:
    """Of the first four bytes."""
    if len(payload) < 4:
        raise ProtocolError(f"a number of {len(payload)} bytes")
    return int.from_bytes(payload[:4]) & _UINT31


def unpadded(flags: int, payload: bytes) -> bytes:
    """Of DATA and HEADERS."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("more padding than there is frame")
    return payload[1 : len(payload) - payload[0]]


class FrameReader:
    """Cuts what comes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) of each that is complete now."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        start = 0
        while len(data) - start >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, start)
            length = high << 8 | low
            if length > _MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            end = start + _HEAD.size + length
            if end > len(data):
                break
            yield kind, flags, stream & _UINT31, data[start + _HEAD.size : end]
            start = end
        self._rest = data[start:]


class Outflow:
    """Bytes for the stream, as DATA frames, as fast as the peer's two windows allow."""

    def __init__(self) -> None:
        self._initial = self._stream = self._connection = WINDOW_BYTES
        self._waiting: deque[memoryview] = deque()

    def set_initial(self, num_bytes: int) -> None:
        """For all of the stream's life: a window may become negative by it."""
        self._stream += num_bytes - self._initial
        self._initial = num_bytes

    def widen(self, stream: int, num_bytes: int) -> None:
        """A window update has come; 0 is the connection."""
        if stream:
            self._stream += num_bytes
        else:
            self._connection += num_bytes

    def put(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))

    def take(self) -> Iterator[bytes]:
        """The frames that may go out now."""
        while self._waiting and (room := min(self._stream, self._connection, _MAX_FRAME_BYTES)) > 0:
            data = self._waiting.popleft()
            if len(data) > room:
                self._waiting.appendleft(data[room:])
                data = data[:room]
            self._stream -= len(data)
            self._connection -= len(data)
            yield frame(Kind.DATA, 0, STREAM, data)
