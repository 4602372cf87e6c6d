"""The header in front of every payload, and the checks that a block must pass before it is used.

    header      b"KVB1" | xxh3-64 of the message, little-endian | proto BlockHeader

The header has a checksum of its own, so that a flipped bit is reported as a damaged header, not as another epoch, say.
"""

from typing import NamedTuple

import xxhash

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import MAX_HEADER_BYTES, BlockHeader, BlockKey, Frame
from kvasir.kv_connector.codec_packing import payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.forms import CODECS, is_convertible
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.wire import header_from_bytes, header_to_bytes

MAGIC = b"KVB1"
FORMAT_VERSION = 1
_PREFIX_BYTES = len(MAGIC) + 8


class Expected(NamedTuple):
    """What the header of the wanted block must say."""

    kv_identity: bytes
    layout: KVLayout
    key: BlockKey
    num_tokens: int
    sender_epoch: str | None = None  # None: any sender


def checksum_of(payload: memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(payload))


def pack(header: BlockHeader) -> bytes:
    message = header_to_bytes(header, FORMAT_VERSION)
    return MAGIC + _checksum_bytes(message) + message


def unpack(data: bytes) -> BlockHeader:
    message = data[_PREFIX_BYTES:]
    if len(data) > MAX_HEADER_BYTES or data[:_PREFIX_BYTES] != MAGIC + _checksum_bytes(message):
        raise BadFrame(MissReason.HEADER, f"{len(data)} bytes that are no header, or a damaged one")
    try:
        return header_from_bytes(message, FORMAT_VERSION)
    except ValueError as error:
        raise BadFrame(MissReason.HEADER, str(error)) from error


def verify(frame: Frame, expected: Expected) -> BlockHeader:
    """Check the frame, and return its header. Raises BadFrame, which names the first thing that is wrong.

    The sender's dtype and codec may be any that are known: `codec.decode` converts the payload.
    """
    header = unpack(frame.header)
    check_header(header, expected)
    check_payload(header, frame.payload)
    return header


def check_header(header: BlockHeader, expected: Expected) -> None:
    """Check what can be known before the payload arrives, such as a size that the layout cannot have."""
    wrong = _first_difference(header, expected)
    if wrong is not None:
        reason, found = wrong
        text = found.hex() if isinstance(found, bytes) else found
        raise BadFrame(reason, f"{reason.value} is {text}, wanted {expected}")
    if header.payload_bytes not in payload_sizes(header.codec, header.layout):
        raise BadFrame(MissReason.TRUNCATED, f"no {header.codec} payload has {header.payload_bytes} bytes")


def _first_difference(header: BlockHeader, expected: Expected) -> tuple[MissReason, object] | None:
    if header.kv_identity != expected.kv_identity:
        return MissReason.IDENTITY, header.kv_identity
    if header.layout != expected.layout and not is_convertible(header.layout, expected.layout):
        return MissReason.LAYOUT, header.layout
    if header.key != expected.key:
        return MissReason.KEY, header.key
    if header.num_tokens != expected.num_tokens:
        return MissReason.TOKENS, header.num_tokens
    if header.codec not in CODECS:
        return MissReason.CODEC, header.codec
    if expected.sender_epoch not in (None, header.sender_epoch):
        return MissReason.EPOCH, header.sender_epoch
    return None


def check_payload(header: BlockHeader, payload: memoryview) -> None:
    """Check that the payload is the one that the header describes."""
    if payload.nbytes != header.payload_bytes:
        raise BadFrame(MissReason.TRUNCATED, f"payload has {payload.nbytes} bytes of {header.payload_bytes}")
    if checksum_of(payload) != header.checksum:
        raise BadFrame(MissReason.CHECKSUM, "payload does not match its checksum")


def _checksum_bytes(message: bytes) -> bytes:
    return int(xxhash.xxh3_64_intdigest(message)).to_bytes(8, "little")
