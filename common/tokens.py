"""Token ids on the wire: little-endian uint32, back to back."""

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """[1, 258] -> b"\\x01\\x00\\x00\\x00\\x02\\x01\\x00\\x00"; OverflowError for what is no uint32"""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def num_packed(packed: bytes) -> int:
    return len(packed) // TOKEN_BYTES


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    if len(packed) == TOKEN_BYTES:  # one, as most are
        return (int.from_bytes(packed, "little"),)
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"token ids take {TOKEN_BYTES} bytes each, got {len(packed)} bytes")
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return tuple(token_ids)
