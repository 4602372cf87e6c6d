"""What stands before every payload, and what a receiver checks before it believes either.

    header      b"KVB1" | xxh3-64 of the message, little-endian | proto BlockHeader

The header is covered by a checksum of its own, so that a flipped bit is a damaged header, and not another epoch.
"""

from dataclasses import dataclass

import xxhash

from kvasir.engine.types import KVLayout
from kvasir.kv_connector.base import CODEC_NONE, BlockHeader, BlockKey, Frame, StoreKey
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.wire import header_from_bytes, header_to_bytes

MAGIC = b"KVB1"
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 4096
_PREFIX_BYTES = len(MAGIC) + 8
_LARGEST_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a block must be, to be taken for the one that is wanted."""

    kv_identity: bytes
    layout: KVLayout
    key: BlockKey
    num_tokens: int
    sender_epoch: str | None = None  # None: whoever made it


class BadFrame(Exception):
    def __init__(self, reason: MissReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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
    """The frame's header, once all of it is as it should be; else BadFrame names the first thing that is not."""
    header = unpack(frame.header)
    checks = (
        (MissReason.IDENTITY, header.kv_identity.hex(), expected.kv_identity.hex()),
        (MissReason.LAYOUT, header.layout, expected.layout),
        (MissReason.KEY, header.key.hex(), expected.key.hex()),
        (MissReason.TOKENS, header.num_tokens, expected.num_tokens),
        (MissReason.CODEC, header.codec, CODEC_NONE),
        (MissReason.EPOCH, header.sender_epoch, expected.sender_epoch or header.sender_epoch),
        (MissReason.TRUNCATED, frame.payload.nbytes, header.payload_bytes),
        (MissReason.TRUNCATED, frame.payload.nbytes, expected.layout.bytes_per_block),
    )
    for reason, found, wanted in checks:
        if found != wanted:
            raise BadFrame(reason, f"{reason.value} is {found}, wanted {wanted}")
    if checksum_of(frame.payload) != header.checksum:
        raise BadFrame(MissReason.CHECKSUM, "payload does not match its checksum")
    return header


def store_key(key: BlockKey, layout: KVLayout, codec: str = CODEC_NONE) -> StoreKey:
    """Blocks of one content hash may be stored exactly and by lossy codecs, and in ranges of heads."""
    heads = f"{layout.first_kv_head}-{layout.num_kv_heads}"
    return StoreKey(f"{key.hex()}-{codec}-{layout.dtype}-{heads}")


def max_payload_bytes(layout: KVLayout) -> int:
    """The most that one block can be, whatever dtype the other side keeps its cache in."""
    return 2 * layout.num_layers * layout.num_kv_heads * layout.block_size * layout.head_dim * _LARGEST_ITEM_BYTES


def _checksum_bytes(message: bytes) -> bytes:
    return int(xxhash.xxh3_64_intdigest(message)).to_bytes(8, "little")
