"""How a frame lies in a store: one value or file a block, so that a block is there or is not.

length of the header, 4 bytes little-endian | header | payload
"""

from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.header import MAX_HEADER_BYTES

_LENGTH_BYTES = 4


def before_payload(frame: Frame) -> bytes:
    return len(frame.header).to_bytes(_LENGTH_BYTES, "little") + frame.header


def max_stored_bytes(max_payload_bytes: int) -> int:
    return _LENGTH_BYTES + MAX_HEADER_BYTES + max_payload_bytes


def split(stored: memoryview) -> Frame:
    """What is torn or foreign becomes a frame that no check will pass."""
    end = _LENGTH_BYTES + int.from_bytes(stored[:_LENGTH_BYTES], "little")
    return Frame(bytes(stored[_LENGTH_BYTES : min(end, _LENGTH_BYTES + MAX_HEADER_BYTES)]), stored[end:])
