"""What a call makes of the frames of a peer, also of those that no gRPC server would send."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.router import http2
from kvasir.router.grpc_stream import GrpcStream
from kvasir.router.http2 import Kind


class Recorder(asyncio.Transport):
    """A connection whose other side is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_open = True

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        parts = list(list_of_data)
        assert parts, "from Python 3.12 on, asyncio's own transport fails where there is nothing to write"
        super().writelines(parts)

    def abort(self) -> None:
        self.is_open = False


@contextmanager
def connected() -> Iterator[tuple[GrpcStream, Recorder, list[bytes]]]:
    """Outside of an event loop: everything is done in the very call."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        messages: list[bytes] = []

        async def make() -> GrpcStream:
            return GrpcStream(b"head", messages.append, 1000)

        stream, recorder = loop.run_until_complete(make()), Recorder()
        stream.connection_made(recorder)
        recorder.written = b""
        yield stream, recorder, messages
        stream.close()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def why_ended(stream: GrpcStream) -> str:
    return str(stream._ended.result())


def head(*headers: tuple[str, str]) -> bytes:
    return hpack.Encoder().encode(headers)


ANSWER = head((":status", "200"), ("content-type", "application/grpc"))
MESSAGE = b"\0\0\0\0\x03abc"


def test_pings_and_settings_are_answered() -> None:
    with connected() as (stream, recorder, _):
        stream.data_received(http2.frame(Kind.PING, 0, 0, b"12345678") + http2.settings({}))
        stream.data_received(http2.window_update(0, 1000) + http2.window_update(1, 1000))
        assert recorder.written == http2.frame(Kind.PING, http2.ACK, 0, b"12345678") + http2.frame(Kind.SETTINGS, 1, 0)
        recorder.written = b""
        stream.data_received(http2.frame(Kind.PING, http2.ACK, 0, b"12345678") + http2.frame(Kind.SETTINGS, 1, 0))
        assert recorder.written == b""


def test_heads_in_parts_padding_and_unknown_frames_are_understood() -> None:
    with connected() as (stream, recorder, messages):
        parts = http2.frame(Kind.HEADERS, http2.PADDED | http2.PRIORITY, 1, b"\x02\0\0\0\0\x10" + ANSWER[:3] + b"\0\0")
        parts += http2.frame(Kind.CONTINUATION, 0, 1, ANSWER[3:7])
        parts += http2.frame(Kind.CONTINUATION, http2.END_HEADERS, 1, ANSWER[7:])
        parts += http2.frame(cast(Kind, 0x42), 0xFF, 0, b"whatever")
        parts += http2.frame(Kind.DATA, http2.PADDED, 1, b"\x03" + MESSAGE + MESSAGE[:6] + b"\0\0\0")
        parts += http2.frame(Kind.DATA, 0, 1, MESSAGE[6:])
        for byte in parts:
            stream.data_received(bytes([byte]))
        assert messages == [b"abc", b"abc"]
        assert recorder.is_open


def test_the_peer_is_given_again_what_it_has_sent() -> None:
    with connected() as (stream, recorder, messages):
        for _ in range(200):
            stream.data_received(http2.frame(Kind.DATA, 0, 1, b"\0\0\0\x03\xe8" + bytes(1000)))
        assert len(messages) == 200
        given = [http2.parse_uint31(payload) for _, _, stream_id, payload in http2.FrameReader().feed(recorder.written)]
        assert given[::2] == given[1::2]  # to the connection as to the stream
        assert 200 * 1005 - http2.WINDOW_BYTES // 2 <= sum(given[::2]) <= 200 * 1005
        assert all(a == b for a, b in pairwise(given))


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (http2.frame(Kind.RST_STREAM, 0, 1, (8).to_bytes(4)), "the stream was reset (HTTP/2 error 8)"),
        (
            http2.frame(Kind.GOAWAY, 0, 0, (1).to_bytes(4) + (11).to_bytes(4) + b"too_many_pings"),
            "the connection was given up (HTTP/2 error 11) too_many_pings",
        ),
        (http2.frame(Kind.GOAWAY, 0, 0, bytes(8)), "the connection was given up (HTTP/2 error 0) "),
        (
            http2.frame(Kind.HEADERS, http2.END_HEADERS, 1, head((":status", "503"))),
            "it does not speak gRPC: HTTP status 503, and no other",
        ),
        (http2.frame(Kind.DATA, 0, 3, b"x"), "it does not speak gRPC: a frame of stream 3"),
        (http2.frame(Kind.DATA, 0, 1, b"\x01\0\0\0\0"), "it does not speak gRPC: a message of 0 bytes, encoding 1"),
        (http2.frame(Kind.DATA, http2.END_STREAM, 1), "it has ended the call without a status"),
        (
            http2.frame(Kind.HEADERS, 5, 1, head((":status", "200"), ("grpc-status", "99"), ("grpc-message", "odd"))),
            "99: odd",
        ),
    ],
)
def test_what_ends_a_call(frames: bytes, why: str) -> None:
    with connected() as (stream, recorder, messages):
        stream.data_received(frames + http2.frame(Kind.DATA, 0, 1, MESSAGE))
        stream.data_received(http2.frame(Kind.DATA, 0, 1, MESSAGE))
        assert why_ended(stream) == why
        assert not recorder.is_open
        assert messages == []
        stream.connection_lost(None)
        assert why_ended(stream) == why


def test_a_head_without_end_is_not_gathered() -> None:
    with connected() as (stream, _, _):
        stream.data_received(http2.frame(Kind.HEADERS, 0, 1, bytes(16_000)))
        for _ in range(5):
            stream.data_received(http2.frame(Kind.CONTINUATION, 0, 1, bytes(16_000)))
        assert why_ended(stream) == "it does not speak gRPC: a head without end"


_frames = st.builds(
    lambda kind, flags, stream, payload: http2.frame(cast(Kind, kind), flags, stream, payload),
    st.integers(0, 10),
    st.integers(0, 255),
    st.integers(0, 1),
    st.binary(max_size=30),
)


@given(st.one_of(st.binary(max_size=200), st.lists(_frames, max_size=6).map(b"".join)))
def test_whatever_a_peer_says_ends_the_call_at_worst(data: bytes) -> None:
    with connected() as (stream, recorder, _):
        stream.data_received(data)
        assert recorder.is_open or why_ended(stream)
