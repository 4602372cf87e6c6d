"""How a block's values are packed on their way, and how they become the receiver's.

    sender's values --encode--> payload (checksummed, travels) --decode--> receiver's values, in the receiver's dtype

A header says the codec and the sender's dtype, so the two sides need not agree beforehand. A block that went through a
lossy codec, or that was computed in another dtype, is not what the receiver would have computed: it is not exact,
and serves only the request that fetched it.
"""

from dataclasses import replace

import torch

from kvasir.engine.types import KVLayout
from kvasir.kernels.kv_codec import convert
from kvasir.kv_connector.base import CODEC_NONE, BlockHeader
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.metrics import MissReason

CODECS = (CODEC_NONE,)  # what a header may name
DTYPES = ("float32", "bfloat16", "float16")
_EXACT_CODECS = (CODEC_NONE,)


def encode(codec: str, payload: memoryview, layout: KVLayout) -> memoryview:
    """`layout.bytes_per_block` bytes -> what travels. `none` gives the payload itself, without a copy."""
    if codec == CODEC_NONE:
        return payload
    raise ValueError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")


def decode(header: BlockHeader, payload: memoryview, into: KVLayout) -> memoryview:
    """A verified frame's payload -> exactly `into.bytes_per_block` bytes in the receiver's dtype.

    Where nothing is to be done, that is the payload itself. BadFrame(CODEC) if it is not what the codec makes.
    """
    if header.codec not in CODECS:
        raise BadFrame(MissReason.CODEC, f"unknown codec {header.codec!r}")
    if not is_convertible(header.layout, into):
        raise BadFrame(MissReason.LAYOUT, f"{header.layout} does not become {into}")
    if payload.nbytes not in payload_sizes(header.codec, header.layout):
        raise BadFrame(MissReason.CODEC, f"{header.codec} makes no payload of {payload.nbytes} bytes")
    if header.layout.dtype == into.dtype:
        return payload
    return _bytes_of(convert(_values_of(payload, header.layout.dtype), getattr(torch, into.dtype)))


def is_exact(codec: str, sender: KVLayout, into: KVLayout) -> bool:
    """Whether a decoded block is, bit by bit, what a node of layout `into` computes."""
    return codec in _EXACT_CODECS and sender.dtype == into.dtype


def is_convertible(sender: KVLayout, into: KVLayout) -> bool:
    """The same values in the same order; only the dtype may differ."""
    return sender.dtype in DTYPES and replace(sender, dtype=into.dtype) == into


def payload_sizes(codec: str, layout: KVLayout) -> range:
    """How many bytes a block can have when it travels, by what is known before it is read."""
    return range(layout.bytes_per_block, layout.bytes_per_block + 1)


def max_payload_bytes(layout: KVLayout) -> int:
    """The most that one block can have, whatever dtype and codec the other side has chosen."""
    return max(payload_sizes(codec, replace(layout, dtype=dtype))[-1] for codec in CODECS for dtype in DTYPES)


def stored_as(codec: str, layout: KVLayout) -> str:
    """The form in which a store's blocks are kept, part of their keys: exact blocks of one dtype share one."""
    kind = "exact" if is_exact(codec, layout, layout) else codec
    return f"{kind}-{layout.dtype}"


STORED_FORMS = frozenset(f"{kind}-{dtype}" for kind in ("exact", "fp16", "int8") for dtype in DTYPES)


def _values_of(payload: memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=getattr(torch, dtype))


def _bytes_of(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data
