"""What stands before every payload, and what a receiver checks before it believes either.

    header      b"KVB1" | xxh3-64 of the message, little-endian | proto BlockHeader

The header is covered by a checksum of its own, so that a flipped bit is a damaged header, and not another epoch.
"""

from typing import NamedTuple

import xxhash

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import (
    CODEC_NONE,
    CODECS,
    MAX_HEADER_BYTES,
    STORED_FORMS,
    BlockHeader,
    BlockKey,
    Frame,
    StoreKey,
)
from kvasir.kv_connector.codec import is_convertible, stored_as
from kvasir.kv_connector.codec_packing import payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.wire import header_from_bytes, header_to_bytes

MAGIC = b"KVB1"
FORMAT_VERSION = 1
_PREFIX_BYTES = len(MAGIC) + 8


class Expected(NamedTuple):
    """What a block must be, to be taken for the one that is wanted."""

    kv_identity: bytes
    layout: KVLayout
    key: BlockKey
    num_tokens: int
    sender_epoch: str | None = None  # None: whoever made it


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
    """The frame's header, once all of it is as it should be; else BadFrame names the first thing that is not.

    The sender's dtype and codec may be any that are known: `codec.decode` turns the payload into what is wanted.
    """
    header = unpack(frame.header)
    check_header(header, expected)
    check_payload(header, frame.payload)
    return header


def check_header(header: BlockHeader, expected: Expected) -> None:
    """Everything that is known before the payload is there: a size that its layout cannot need is refused by then."""
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
    """That the payload is the one that the header speaks of."""
    if payload.nbytes != header.payload_bytes:
        raise BadFrame(MissReason.TRUNCATED, f"payload has {payload.nbytes} bytes of {header.payload_bytes}")
    if checksum_of(payload) != header.checksum:
        raise BadFrame(MissReason.CHECKSUM, "payload does not match its checksum")


def store_key(key: BlockKey, layout: KVLayout, form: str | None = None) -> StoreKey:
    """Blocks of one content hash may be stored exactly and by lossy codecs, and in ranges of heads.

    form: what `codec.stored_as` gives, of whoever stored it; None: exact, in this layout's dtype. ValueError if it is
    not one that exists: it may have come over the wire, and names of files are made of it.
    """
    form = form or stored_as(CODEC_NONE, layout)
    if form not in STORED_FORMS:
        raise ValueError(f"no block is stored as {form!r}")
    return StoreKey(f"{key.hex()}-{form}-{layout.first_kv_head}-{layout.num_kv_heads}")


def _checksum_bytes(message: bytes) -> bytes:
    return int(xxhash.xxh3_64_intdigest(message)).to_bytes(8, "little")
