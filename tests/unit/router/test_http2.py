"""Frames as RFC 9113 has them, and windows that are not overrun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.router import http2
from kvasir.router.http2 import FrameReader, Kind, Outflow, ProtocolError, Setting


def test_a_frame_is_what_the_standard_says() -> None:
    assert http2.frame(Kind.PING, http2.ACK, 0, b"12345678") == b"\0\0\x08\x06\x01\0\0\0\x0012345678"
    assert http2.settings({Setting.ENABLE_PUSH: 0}) == b"\0\0\x06\x04\0\0\0\0\0\0\x02\0\0\0\0"
    assert http2.window_update(1, 65536) == b"\0\0\x04\x08\0\0\0\0\x01\0\x01\0\0"
    assert http2.frame(Kind.DATA, 0, 1, bytes(0x1234))[:3] == b"\0\x12\x34"


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1))
def test_frames_are_found_however_the_bytes_come(payloads: list[bytes], sizes: list[int]) -> None:
    data = b"".join(http2.frame(Kind.DATA, 5, 1, payload) for payload in payloads)
    reader, found, start, turn = FrameReader(), [], 0, 0
    while start < len(data):
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[start : start + size])
        start, turn = start + size, turn + 1
    assert found == [(Kind.DATA, 5, 1, payload) for payload in payloads]


def test_what_is_no_frame_of_ours_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a frame of 16385 bytes"):
        list(FrameReader().feed(b"\0\x40\x01\0\0\0\0\0\x01"))
    with pytest.raises(ProtocolError, match="settings of 5 bytes"):
        list(http2.parse_settings(bytes(5)))
    with pytest.raises(ProtocolError, match="a number of 3 bytes"):
        http2.parse_uint31(bytes(3))
    for payload in (b"", b"\x01", b"\x03ab"):
        with pytest.raises(ProtocolError, match="more padding"):
            http2.unpadded(http2.PADDED, payload)


def test_padding_is_taken_off() -> None:
    assert http2.unpadded(http2.PADDED, b"\x02abc\0\0") == b"abc"
    assert http2.unpadded(http2.PADDED, b"\x02\0\0") == b""
    assert http2.unpadded(0, b"\x02abc") == b"\x02abc"


def data_of(frames: list[bytes]) -> bytes:
    return b"".join(frame[9:] for frame in frames)


def test_no_more_goes_out_than_both_windows_allow() -> None:
    outflow = Outflow()
    data = bytes(index % 251 for index in range(200_000))
    outflow.put(data[:5])
    outflow.put(data[5:])
    frames = list(outflow.take())
    assert len(data_of(frames)) == http2.WINDOW_BYTES
    assert max(map(len, frames)) == 16_384 + 9
    outflow.widen(1, 100_000)
    assert list(outflow.take()) == []  # the connection's is still used up
    outflow.widen(0, 1000)
    frames += outflow.take()
    assert len(data_of(frames)) == http2.WINDOW_BYTES + 1000
    outflow.widen(0, 1 << 20)
    outflow.widen(1, 1 << 20)
    frames += outflow.take()
    assert data_of(frames) == data


def test_a_window_may_become_smaller_than_nothing() -> None:
    outflow = Outflow()
    outflow.put(bytes(60_000))
    assert len(data_of(list(outflow.take()))) == 60_000
    outflow.set_initial(1000)  # 59,000 too many have gone out
    outflow.widen(0, 1 << 20)
    outflow.put(bytes(100))
    outflow.widen(1, 59_000)
    assert list(outflow.take()) == []
    outflow.widen(1, 1)
    assert len(data_of(list(outflow.take()))) == 1
    outflow.set_initial(2000)
    assert len(data_of(list(outflow.take()))) == 99
