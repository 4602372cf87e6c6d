"""Payloads that are damaged, or nonsense that is signed: never taken for a block, at no cost in memory."""

import tracemalloc
from dataclasses import replace

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.codec import decode, encode
from kvasir.kv_connector.codec_packing import payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.forms import CODECS
from kvasir.kv_connector.header import pack, verify
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.testing import LARGE, SMALL
from tests.unit.kv_connector.coding import (
    FLOATS,
    bytes_of,
    expected_by,
    header_of,
    some_block,
)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_change_on_the_way_goes_unseen(codec: str, data: st.DataObject) -> None:
    payload = bytearray(encode(codec, bytes_of(some_block(SMALL)), SMALL))
    header = pack(header_of(codec, memoryview(payload), SMALL))
    kind = data.draw(st.sampled_from(["flip", "cut", "extend"]))
    reasons = {MissReason.TRUNCATED}
    if kind == "flip":
        bit = data.draw(st.integers(0, len(payload) * 8 - 1))
        payload[bit // 8] ^= 1 << bit % 8
        reasons = {MissReason.CHECKSUM}
    elif kind == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    else:
        payload += data.draw(st.binary(min_size=1, max_size=50))
    with pytest.raises(BadFrame) as caught:
        verify(Frame(header, memoryview(payload)), expected_by(SMALL))
    assert caught.value.reason in reasons


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_sender_that_makes_nonsense_and_signs_it_is_survived(codec: str, data: st.DataObject) -> None:
    """The checksum is right, the payload is not: it is refused by name, or it is some block of the right size."""
    payload = bytearray(encode(codec, bytes_of(some_block(SMALL)), SMALL))
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(payload)))
        payload[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    header = header_of(codec, memoryview(payload), SMALL)
    frame, reason = Frame(pack(header), memoryview(payload)), None
    try:
        num_bytes = decode(verify(frame, expected_by(SMALL)), frame.payload, SMALL).nbytes
    except BadFrame as error:
        num_bytes, reason = 0, error.reason
    assert num_bytes == SMALL.bytes_per_block or reason in (MissReason.TRUNCATED, MissReason.CODEC)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("named", [*CODECS, "", "zip", "INT8"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_under_another_codecs_name_is_refused(codec: str, named: str, dtype: str) -> None:
    if named == codec:
        return
    layout = replace(SMALL, dtype=dtype)
    payload = encode(codec, bytes_of(some_block(layout)), layout)
    header = header_of(named, payload, layout)
    with pytest.raises(BadFrame) as caught:
        decode(verify(Frame(pack(header), payload), expected_by(SMALL)), payload, SMALL)
    assert caught.value.reason in (MissReason.TRUNCATED, MissReason.CODEC)
    with pytest.raises(BadFrame):
        decode(header, payload, SMALL)


def lossless_of(planes: list[bytes], layout: KVLayout = LARGE) -> memoryview:
    lengths = b"".join(len(plane).to_bytes(4, "little") for plane in planes)
    return memoryview(b"kvc-zstd" + lengths + b"".join(planes))


PLANE_BYTES = LARGE.bytes_per_block // 4


def frame_of_zeros(num_bytes: int, *, says_so: bool) -> bytes:
    """A few KB, however many."""
    stream = zstandard.ZstdCompressor().compressobj(**({"size": num_bytes} if says_so else {}))
    parts = [stream.compress(bytes(min(1 << 20, num_bytes - start))) for start in range(0, num_bytes, 1 << 20)]
    return b"".join(parts) + stream.flush()


def frame_with_a_wide_window(window_log: int) -> bytes:
    """Says to hold a plane, and does: one byte, so many times. By hand, since no compressor would ask for as much."""
    window = ((window_log - 10) << 3).to_bytes(1, "little")
    block = (PLANE_BYTES << 3 | 1 << 1 | 1).to_bytes(3, "little")  # the last one, one byte repeated
    return b"\x28\xb5\x2f\xfd\x80" + window + PLANE_BYTES.to_bytes(4, "little") + block + b"\0"


@pytest.mark.parametrize(
    "frame",
    [
        frame_of_zeros(128 << 20, says_so=True),
        frame_of_zeros(128 << 20, says_so=False),
        frame_of_zeros(PLANE_BYTES, says_so=False),
        frame_of_zeros(PLANE_BYTES + 1, says_so=True),
        frame_of_zeros(PLANE_BYTES - 1, says_so=True),
        frame_of_zeros(PLANE_BYTES, says_so=True)[:-1],
        frame_of_zeros(PLANE_BYTES, says_so=True) + frame_of_zeros(PLANE_BYTES, says_so=True),
        frame_with_a_wide_window(27),
        b"\x28\xb5\x2f\xfd",
        b"",
    ],
    ids=["bomb", "mute bomb", "mute", "more", "less", "torn", "two", "wide", "magic", "empty"],
)
def test_a_frame_that_is_not_a_plane_is_refused_and_takes_no_memory(frame: bytes) -> None:
    payload = lossless_of([bytes(PLANE_BYTES)] * 3 + [frame])
    tracemalloc.start()
    with pytest.raises(BadFrame) as caught:
        decode(header_of("lossless", payload, LARGE), payload, LARGE)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason is MissReason.CODEC
    assert peak_bytes < 4 * LARGE.bytes_per_block


@pytest.mark.parametrize("frame", [frame_of_zeros(PLANE_BYTES, says_so=True), frame_with_a_wide_window(20)])
def test_any_compressors_frame_of_a_plane_is_read(frame: bytes) -> None:
    payload = lossless_of([bytes(PLANE_BYTES)] * 3 + [frame])
    assert bytes(decode(header_of("lossless", payload, LARGE), payload, LARGE)) == bytes(LARGE.bytes_per_block)


def test_a_size_that_no_block_has_is_refused_by_the_header_alone() -> None:
    for codec in CODECS:
        for num_bytes in (0, payload_sizes(codec, SMALL)[0] - 1, payload_sizes(codec, SMALL)[-1] + 1, 2**63):
            header = header_of(codec, memoryview(b""), SMALL)._replace(payload_bytes=num_bytes)
            with pytest.raises(BadFrame) as caught:
                verify(Frame(pack(header), memoryview(b"")), expected_by(SMALL))
            assert caught.value.reason is MissReason.TRUNCATED
