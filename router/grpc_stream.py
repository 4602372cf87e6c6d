"""A bidirectional gRPC call, spoken by the event loop itself on a connection of the call's own.

`grpc.aio` hands each message from a thread of its own through a queue and a socket to the event loop, and each write
back: for small messages that is most of their cost, and the two wait for each other. Here a message that comes is
given to `on_message` where the socket is read, and what is sent at one time is written together: a write goes through
the kernel and wakes the peer.

What a gRPC channel does besides is left out: the connection lives as long as the call, nothing is compressed, whoever
calls notices a silent peer (no pings) and calls again.
"""

import asyncio
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

import grpc
import hpack

from kvasir.common.addresses import split_address
from kvasir.common.grpc_options import MAX_MESSAGE_BYTES, SECRET_METADATA_KEY
from kvasir.router import http2
from kvasir.router.http2 import Kind, Setting

OnMessage = Callable[[bytes], None]

_STATUS_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}
_PREFIX_BYTES = 5  # before each message: whether it is compressed, and how long it is
_MAX_HEAD_BYTES = 64 << 10


async def open_stream(
    address: str,
    method: str,
    secret: str | None,
    on_message: OnMessage,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> "GrpcStream":
    """Calls `method` ("/package.Service/Method"). OSError: nobody is there; ValueError: that is no address."""
    host, port = split_address(address)
    stream = GrpcStream(_request_head(address, method, secret), on_message, max_message_bytes)
    await asyncio.get_running_loop().create_connection(lambda: stream, host, port)
    return stream


def _request_head(address: str, method: str, secret: str | None) -> bytes:
    headers: list[tuple[str, str] | hpack.HeaderTuple] = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "kvasir-router"),
    ]
    if secret is not None:
        headers.append(hpack.NeverIndexedHeaderTuple(SECRET_METADATA_KEY, secret))
    return hpack.Encoder().encode(headers)


class GrpcStream(asyncio.Protocol):
    """Opened by `open_stream`, to be closed by `close`."""

    def __init__(self, request_head: bytes, on_message: OnMessage, max_message_bytes: int) -> None:
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._request_head = request_head
        self._on_message = on_message
        self._max_message_bytes = max_message_bytes
        self._frames = http2.FrameReader()
        self._outflow = http2.Outflow()
        self._heads = hpack.Decoder(_MAX_HEAD_BYTES)
        self._head = b""  # that has come in part
        self._head_ends_stream = False
        self._message = bytearray()  # likewise, with its prefix
        self._num_unreported = 0  # bytes that have come, and that the peer has not been given again
        self._will_write = False  # as soon as whoever sends has come to an end
        self._transport: asyncio.Transport

    # --- for whoever calls ---------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Never waits: what the peer does not take yet is kept. After the end it is dropped."""
        if not self._ended.done():
            self._outflow.put(b"\0%b%b" % (len(message).to_bytes(4), message))
            if not self._will_write:
                self._will_write = True
                asyncio.get_running_loop().call_soon(self._write_data)

    async def ended(self) -> str:
        """Waits for the end of the call, and says why it has ended."""
        return await asyncio.shield(self._ended)

    def close(self) -> None:
        """Cancels the call, if it has not ended, behind what has been sent. Harmless the second time."""
        self._write_data()
        self._end("closed on this side")

    # --- for the connection --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        head = http2.frame(Kind.HEADERS, http2.END_HEADERS, http2.STREAM, self._request_head)
        self._transport.write(http2.PREFACE + http2.settings({Setting.ENABLE_PUSH: 0}) + head)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection is lost ({error or 'closed by the other side'})")

    def data_received(self, data: bytes) -> None:
        if self._ended.done():
            return
        try:
            for kind, flags, stream, payload in self._frames.feed(data):
                if stream not in (0, http2.STREAM):
                    raise http2.ProtocolError(f"a frame of stream {stream}")
                self._receive(kind, flags, stream, payload)
                if self._ended.done():
                    return
        except (http2.ProtocolError, hpack.HPACKError) as error:
            self._end(f"it does not speak gRPC: {error}")

    def _receive(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Frames of other kinds are to be ignored."""
        if kind == Kind.DATA:
            self._receive_data(flags, payload)
        elif kind == Kind.WINDOW_UPDATE:
            self._outflow.widen(stream, http2.parse_uint31(payload))
            self._write_data()
        elif kind == Kind.PING and not flags & http2.ACK:
            self._transport.write(http2.frame(Kind.PING, http2.ACK, 0, payload))
        elif kind == Kind.SETTINGS and not flags & http2.ACK:
            self._receive_settings(payload)
        elif kind == Kind.HEADERS:
            payload = http2.unpadded(flags, payload)
            self._head = payload[5:] if flags & http2.PRIORITY else payload
            self._head_ends_stream = bool(flags & http2.END_STREAM)
            self._receive_head(flags)
        elif kind == Kind.CONTINUATION:
            self._head += payload
            self._receive_head(flags)
        elif kind == Kind.RST_STREAM:
            self._end(f"the stream was reset (HTTP/2 error {http2.parse_uint31(payload)})")
        elif kind == Kind.GOAWAY:
            last_stream, error = http2.parse_uint31(payload), http2.parse_uint31(payload[4:])
            if error or last_stream < http2.STREAM:  # otherwise nothing new is taken, and this may go on
                self._end(f"the connection was given up (HTTP/2 error {error}) {payload[8:].decode(errors='replace')}")

    def _receive_settings(self, payload: bytes) -> None:
        for name, value in http2.parse_settings(payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                self._outflow.set_initial(value)
        self._transport.write(http2.frame(Kind.SETTINGS, http2.ACK, 0))
        self._write_data()

    def _write_data(self) -> None:
        self._will_write = False
        if not self._ended.done() and (frames := list(self._outflow.take())):
            self._transport.writelines(frames)

    def _receive_head(self, flags: int) -> None:
        """Of the answer, or of its end. Both may be one."""
        if len(self._head) > _MAX_HEAD_BYTES:
            raise http2.ProtocolError("a head without end")
        if not flags & http2.END_HEADERS:
            return
        head = cast(dict[str, str], dict(self._heads.decode(self._head)))
        http_status = head.get(":status", "200")
        if "grpc-status" in head:
            status = head["grpc-status"]
            message = unquote(head.get("grpc-message", ""))
            self._end(f"{_STATUS_NAMES.get(status, status)}: {message}" if status != "0" else "the call is done")
        elif http_status != "200" or self._head_ends_stream:
            self._end(f"it does not speak gRPC: HTTP status {http_status}, and no other")

    def _receive_data(self, flags: int, payload: bytes) -> None:
        self._num_unreported += len(payload)
        if self._num_unreported > http2.WINDOW_BYTES // 2:
            for stream in (0, http2.STREAM):
                self._transport.write(http2.window_update(stream, self._num_unreported))
            self._num_unreported = 0
        self._message += http2.unpadded(flags, payload)
        while len(self._message) >= _PREFIX_BYTES and not self._ended.done():
            length = int.from_bytes(self._message[1:_PREFIX_BYTES])
            if self._message[0] or length > self._max_message_bytes:
                raise http2.ProtocolError(f"a message of {length} bytes, encoding {self._message[0]}")
            end = _PREFIX_BYTES + length
            if len(self._message) < end:
                break
            message = bytes(self._message[_PREFIX_BYTES:end])
            del self._message[:end]
            self._on_message(message)
        if flags & http2.END_STREAM:
            self._end("it has ended the call without a status")

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)
            self._transport.abort()  # which cancels the call there
