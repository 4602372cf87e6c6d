"""How a block's values are packed for the way, and how they are converted to the receiver's dtype.

    sender's bytes --encode--> payload (checksummed, travels) --decode--> receiver's bytes, in the receiver's dtype

    none        the bytes themselves, without a copy
    lossless    byte planes and zstd: for links of a few Gbit/s or less
    fp16        half the size of float32; values beyond +-65504 saturate
    int8        a quarter of float32, with a scale for each token of each head; the error is at most half a scale
    fp8         the same with float8 e4m3; the error is at most a 16th of each value

Blocks of an int8 cache are small already; the lossy codecs leave them as they are.

A header names the codec and the sender's dtype, so the two sides need not agree beforehand. A block that went through a
lossy codec, or was computed in another dtype, is not exact: it differs from what the receiver would have computed, and
serves only the request that fetched it. All functions here may run on any thread. `encode_from` and `decode_into` let
the GPU that holds a block pack and unpack it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector import codec_packing
from kvasir.kv_connector.base import BlockHeader, BlockMemory
from kvasir.kv_connector.codec_packing import TAG_BYTES, BadPayload, Bytes, payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.forms import CODEC_NONE, CODECS, DTYPES, LOSSY, codec_for, is_convertible
from kvasir.kv_connector.metrics import MissReason

_loaded: set[tuple[str, str, str]] = set()  # codec, dtype of the sender, dtype of the receiver


def encode(codec: str, payload: memoryview, layout: KVLayout) -> memoryview:
    """A block's `layout.bytes_per_block` bytes -> the payload that travels; for `none` the same memory, not a copy.

    The block must not change meanwhile. Raises ValueError for an unknown codec, or one that does not pack this layout.
    """
    if codec == CODEC_NONE:
        return payload
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")
    if codec != codec_for(codec, layout):
        raise ValueError(f"{codec} packs no blocks of {layout.dtype}")
    return _pack(codec, _aligned(payload), layout).data


def encode_from(memory: BlockMemory, block_id: BlockId, codec: str) -> memoryview:
    """A block of this memory -> the payload that travels."""
    layout, packing = memory.layout, memory.packing
    if packing is None or codec not in LOSSY or codec != codec_for(codec, layout):
        return encode(codec, memory.read(block_id), layout)
    payload = codec_packing.empty_payload(codec, layout)
    packing.read_packed(block_id, codec, payload[TAG_BYTES:].data)
    return payload.data


def decode_into(memory: BlockMemory, block_id: BlockId, header: BlockHeader, payload: memoryview) -> None:
    """Decode a verified frame's payload into a block of this memory. Raises as `decode`, before writing anything."""
    packing = memory.packing
    if packing is None or header.codec not in LOSSY:
        memory.write(block_id, decode(header, payload, memory.layout))
        return
    _check(header, payload, memory.layout)
    with _bad_frames(header.codec):
        packed = codec_packing.without_tag(header.codec, np.frombuffer(payload, np.uint8))
    packing.write_packed(block_id, header.codec, packed.data)


def decode(header: BlockHeader, payload: memoryview, into: KVLayout) -> memoryview:
    """A verified frame's payload -> exactly `into.bytes_per_block` bytes in the receiver's dtype.

    If nothing has to be done, that is the payload itself. Raises BadFrame(CODEC) if the payload is not one of this
    codec. Never takes more memory than a few blocks, whatever the payload claims.
    """
    _check(header, payload, into)
    return _decoded(header.codec, payload, header.layout, into)


def is_loaded(codec: str, sender: KVLayout, memory: BlockMemory) -> bool:
    """Whether such blocks can be decoded at once. If not, `load` first: that may take seconds."""
    is_done_there = memory.packing is not None and codec in LOSSY
    is_nothing = codec == CODEC_NONE and sender.dtype == memory.layout.dtype
    return is_done_there or is_nothing or (codec, sender.dtype, memory.layout.dtype) in _loaded


def load(codec: str, sender: KVLayout, into: KVLayout) -> None:
    """Load what packs and unpacks such blocks; a machine's first start compiles it. Not for the event loop's thread."""
    payload = encode(codec, memoryview(bytes(sender.bytes_per_block)), sender)
    _decoded(codec, payload, sender, into)
    _loaded.add((codec, sender.dtype, into.dtype))


def max_payload_bytes(layout: KVLayout) -> int:
    """The largest payload of one block, whatever dtype and codec the other side has chosen."""
    sizes = [payload_sizes(codec, replace(layout, dtype=dtype)) for codec in CODECS for dtype in DTYPES]
    return max(size[-1] for size in sizes if size)


def _decoded(codec: str, payload: memoryview, sender: KVLayout, into: KVLayout) -> memoryview:
    if codec == CODEC_NONE and sender.dtype == into.dtype:
        return payload
    with _bad_frames(codec):
        values, dtype = _unpack(codec, _aligned(payload), sender)
    return codec_packing.as_dtype(values, dtype, into.dtype, into).data


def _check(header: BlockHeader, payload: memoryview, into: KVLayout) -> None:
    """Check what can be checked without decoding."""
    if header.codec not in CODECS:
        raise BadFrame(MissReason.CODEC, f"unknown codec {header.codec!r}")
    if not is_convertible(header.layout, into):
        raise BadFrame(MissReason.LAYOUT, f"{header.layout} does not become {into}")
    if payload.nbytes not in payload_sizes(header.codec, header.layout):
        raise BadFrame(MissReason.CODEC, f"{header.codec} makes no payload of {payload.nbytes} bytes")


@contextmanager
def _bad_frames(codec: str) -> Iterator[None]:
    try:
        yield
    except BadPayload as error:
        raise BadFrame(MissReason.CODEC, f"{codec}: {error}") from error


def _pack(codec: str, values: Bytes, layout: KVLayout) -> Bytes:
    match codec:
        case "lossless":
            return codec_packing.pack_lossless(values, layout)
        case "fp16":
            return codec_packing.pack_fp16(values, layout)
    return codec_packing.pack_scaled(codec, values, layout)


def _unpack(codec: str, payload: Bytes, layout: KVLayout) -> tuple[Bytes, str]:
    """The values, and the dtype that they have after decoding."""
    match codec:
        case "lossless":
            return codec_packing.unpack_lossless(payload, layout), layout.dtype
        case "fp16":
            return codec_packing.unpack_fp16(payload, layout), "float16"
        case "int8" | "fp8":
            return codec_packing.unpack_scaled(codec, payload, layout), "float32"
    return payload, layout.dtype


def _aligned(payload: memoryview) -> Bytes:
    """The payload's bytes at an address that is a multiple of 4, as numpy's views need; copied only if they are not."""
    data = np.frombuffer(payload, np.uint8)
    return data if data.ctypes.data % 4 == 0 else data.copy()
