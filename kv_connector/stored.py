"""How a block is kept in a store: one value or file, so that it is there as a whole or not at all.

under its key, 3fa0...-exact-float32-0-3:
length of the header, 4 bytes little-endian | header | zeros up to a multiple of `alignment` | payload
"""

from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import MAX_HEADER_BYTES, BlockKey, Frame, StoreKey
from kvasir.kv_connector.forms import CODEC_NONE, STORED_FORMS, stored_as

_LENGTH_BYTES = 4


def store_key(key: BlockKey, layout: KVLayout, form: str | None = None) -> StoreKey:
    """The key of a stored block. A block with one content hash may be stored in several forms and ranges of heads.

    form: what `stored_as` gives for the node that stored it; None: exact, in this layout's dtype. Raises
    ValueError if there is no such form: it may come over the wire, and file names are made of it.
    """
    form = form or stored_as(CODEC_NONE, layout)
    if form not in STORED_FORMS:
        raise ValueError(f"no block is stored as {form!r}")
    return StoreKey(f"{key.hex()}-{form}-{layout.first_kv_head}-{layout.num_kv_heads}")


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
