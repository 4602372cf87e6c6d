"""How a frame is laid out in a store: one value or file per block, so that a block is there as a whole or not at all.

length of the header, 4 bytes little-endian | header | zeros up to a multiple of `alignment` | payload
"""

from kvasir.kv_connector.base import MAX_HEADER_BYTES, Frame

_LENGTH_BYTES = 4


def before_payload(frame: Frame, alignment: int) -> bytes:
    """Everything that is stored in front of the payload."""
    stored = len(frame.header).to_bytes(_LENGTH_BYTES, "little") + frame.header
    return stored.ljust(_aligned(len(stored), alignment), b"\0")


def max_stored_bytes(max_payload_bytes: int, alignment: int) -> int:
    return _aligned(_LENGTH_BYTES + MAX_HEADER_BYTES, alignment) + max_payload_bytes


def split(stored: memoryview, alignment: int) -> Frame:
    """The frame of a stored value; its payload is a view. Torn or foreign bytes give a frame that fails every check."""
    num_header_bytes = int.from_bytes(stored[:_LENGTH_BYTES], "little")
    if num_header_bytes > MAX_HEADER_BYTES:
        return Frame(b"", stored[:0])
    end = _LENGTH_BYTES + num_header_bytes
    return Frame(bytes(stored[_LENGTH_BYTES:end]), stored[_aligned(end, alignment) :])


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
