"""How a block's values are packed on their way, and how they become the receiver's.

    sender's bytes --encode--> payload (checksummed, travels) --decode--> receiver's bytes, in the receiver's dtype

    none        the bytes themselves, without a copy
    lossless    byte planes and zstd: for links of a few Gbit/s and less
    fp16        half of float32; values beyond +-65504 saturate
    int8        a quarter of float32, with a scale for each token of each head: an error of half a scale
    fp8         the same in float8 e4m3: an error of a 16th of each value

A block of a cache in int8 is small already: the lossy ones leave it as it is.

A header says the codec and the sender's dtype, so the two sides need not agree beforehand. A block that went through a
lossy codec, or that was computed in another dtype, is not what the receiver would have computed: it is not exact,
and serves only the request that fetched it. All functions here may run in any thread, and but for two are pure:
`encode_from` and `decode_into` have a GPU that holds the block pack and unpack it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector import codec_packing
from kvasir.kv_connector.base import CODEC_LOSSLESS, CODEC_NONE, CODECS, DTYPES, LOSSY, BlockHeader, BlockMemory
from kvasir.kv_connector.codec_packing import TAG_BYTES, BadPayload, Bytes, payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.metrics import MissReason

_loaded: set[tuple[str, str, str]] = set()  # codec, dtype of the sender, dtype of the receiver


def codec_for(codec: str, layout: KVLayout) -> str:
    """What is asked for, where it makes a block of this layout smaller; else `none`."""
    return CODEC_NONE if layout.dtype == "int8" and codec in LOSSY else codec


def encode(codec: str, payload: memoryview, layout: KVLayout) -> memoryview:
    """`layout.bytes_per_block` bytes of a block -> what travels. `none` gives the payload itself, without a copy.

    The block must not change meanwhile. ValueError for a codec that there is not, or that is not for this layout.
    """
    if codec == CODEC_NONE:
        return payload
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; known are {', '.join(CODECS)}")
    if codec != codec_for(codec, layout):
        raise ValueError(f"{codec} packs no blocks of {layout.dtype}")
    return _pack(codec, _aligned(payload), layout).data


def encode_from(memory: BlockMemory, block_id: BlockId, codec: str) -> memoryview:
    """A block of this memory -> what travels."""
    layout, packing = memory.layout, memory.packing
    if packing is None or codec not in LOSSY or codec != codec_for(codec, layout):
        return encode(codec, memory.read(block_id), layout)
    payload = codec_packing.empty_payload(codec, layout)
    packing.read_packed(block_id, codec, payload[TAG_BYTES:].data)
    return payload.data


def decode_into(memory: BlockMemory, block_id: BlockId, header: BlockHeader, payload: memoryview) -> None:
    """A verified frame's payload into a block of this memory. Raises as `decode` does, and nothing has been written."""
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

    Where nothing is to be done, that is the payload itself. BadFrame(CODEC) if it is not what the codec makes of a
    block; never takes more memory than a few blocks, whatever the payload claims.
    """
    _check(header, payload, into)
    return _decoded(header.codec, payload, header.layout, into)


def is_loaded(codec: str, sender: KVLayout, memory: BlockMemory) -> bool:
    """Whether all is there to take such blocks in; else that may take seconds, the first time."""
    is_done_there = memory.packing is not None and codec in LOSSY
    is_nothing = codec == CODEC_NONE and sender.dtype == memory.layout.dtype
    return is_done_there or is_nothing or (codec, sender.dtype, memory.layout.dtype) in _loaded


def load(codec: str, sender: KVLayout, into: KVLayout) -> None:
    """What packs and unpacks such blocks, compiled on a machine's first start. For any thread but the event loop's."""
    payload = encode(codec, memoryview(bytes(sender.bytes_per_block)), sender)
    _decoded(codec, payload, sender, into)
    _loaded.add((codec, sender.dtype, into.dtype))


def is_exact(codec: str, sender: KVLayout, into: KVLayout) -> bool:
    """Whether a decoded block is, bit by bit, what a node of layout `into` computes."""
    loses_nothing = codec in (CODEC_NONE, CODEC_LOSSLESS) or (codec, sender.dtype) == ("fp16", "float16")
    return loses_nothing and sender.dtype == into.dtype


@lru_cache(maxsize=64)
def is_convertible(sender: KVLayout, into: KVLayout) -> bool:
    """The same values in the same order; only the dtype may differ."""
    return sender.dtype in DTYPES and replace(sender, dtype=into.dtype) == into


def max_payload_bytes(layout: KVLayout) -> int:
    """The most that one block can have on its way, whatever dtype and codec the other side has chosen."""
    sizes = [payload_sizes(codec, replace(layout, dtype=dtype)) for codec in CODECS for dtype in DTYPES]
    return max(size[-1] for size in sizes if size)


def stored_as(codec: str, layout: KVLayout) -> str:
    """The form in which a store's blocks are kept, part of their keys: exact blocks of one dtype share one."""
    kind = "exact" if is_exact(codec_for(codec, layout), layout, layout) else codec
    return f"{kind}-{layout.dtype}"


def _decoded(codec: str, payload: memoryview, sender: KVLayout, into: KVLayout) -> memoryview:
    if codec == CODEC_NONE and sender.dtype == into.dtype:
        return payload
    with _bad_frames(codec):
        values, dtype = _unpack(codec, _aligned(payload), sender)
    return codec_packing.as_dtype(values, dtype, into.dtype, into).data


def _check(header: BlockHeader, payload: memoryview, into: KVLayout) -> None:
    """What can be seen from outside"""
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
    """The values, and the dtype that they have now."""
    match codec:
        case "lossless":
            return codec_packing.unpack_lossless(payload, layout), layout.dtype
        case "fp16":
            return codec_packing.unpack_fp16(payload, layout), "float16"
        case "int8" | "fp8":
            return codec_packing.unpack_scaled(codec, payload, layout), "float32"
    return payload, layout.dtype


def _aligned(payload: memoryview) -> Bytes:
    """What comes out of the middle of a buffer may lie anywhere; values may not."""
    data = np.frombuffer(payload, np.uint8)
    return data if data.ctypes.data % 4 == 0 else data.copy()
