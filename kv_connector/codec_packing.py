"""The payloads of the codecs: what travels in place of a block's own bytes.

    lossless    tag | length of each plane, 4 bytes little-endian | planes, each as a zstd frame, or as it is
    fp16        tag | values as float16
    int8        tag | scales as float32 [R] | values as int8 [R, D]        R: layers, keys and values, heads, tokens
    fp8         tag | scales as float32 [R] | values as float8 e4m3 [R, D]

The tag names the codec, so that no payload is ever decoded by another codec. Each token of each head has a scale of its
own, so the unused tokens at the end of a partial block do not affect the others.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvasir.engine.blocks import KVLayout
from kvasir.kernels.kv_codec import (
    Quantized,
    convert,
    dequantize,
    join_heads,
    merge_planes,
    quantize,
    split_heads,
    split_planes,
)
from kvasir.kernels.kv_dtypes import VALUE_BYTES, row_bytes
from kvasir.kv_connector.forms import CODEC_LOSSLESS, CODEC_NONE, LOSSY

Bytes = NDArray[np.uint8]

TAG_BYTES = 8
_TAGS = {"lossless": b"kvc-zstd", "fp16": b"kvc-fp16", "int8": b"kvc-int8", "fp8": b"kvc-e4m3"}
_SCALED: dict[str, Quantized] = {"int8": "int8", "fp8": "e4m3"}
_MAX_WINDOW_BYTES = 1 << 23
_local = threading.local()  # compressors may not be shared between threads


class BadPayload(ValueError):
    """These bytes are not what the codec makes of a block."""


def bytes_of(layout: KVLayout, dtype: str | None = None) -> int:
    """The size of a block in bytes, in the layout's dtype or in another."""
    return num_rows(layout) * row_bytes(dtype or layout.dtype, layout.head_dim)


def planes_of(layout: KVLayout) -> tuple[int, int]:
    """How many byte planes a block is split into, and the bytes of each. An int8 block, scales and all, is one."""
    width = VALUE_BYTES[layout.dtype]
    return width, bytes_of(layout) // width


def num_values(layout: KVLayout) -> int:
    return num_rows(layout) * layout.head_dim


def num_rows(layout: KVLayout) -> int:
    """Rows of `head_dim` values: one key and one value for each token, head and layer."""
    return 2 * layout.num_layers * layout.num_kv_heads * layout.block_size


def empty_payload(codec: str, layout: KVLayout) -> Bytes:
    """A payload with only its tag written, for codecs whose payloads all have one size."""
    payload = np.empty(payload_sizes(codec, layout)[0], np.uint8)
    payload[:TAG_BYTES] = _tag(codec)
    return payload


def without_tag(codec: str, payload: Bytes) -> Bytes:
    """A view of the payload behind its tag. Raises BadPayload if the tag is not this codec's."""
    if bytes(payload[:TAG_BYTES]) != _TAGS[codec]:
        raise BadPayload(f"begins with {bytes(payload[:TAG_BYTES])!r}, wanted {_TAGS[codec]!r}")
    return payload[TAG_BYTES:]


def pack_lossless(values: Bytes, layout: KVLayout) -> Bytes:
    """Compress byte planes: plane k has byte k of every value. Exponents shrink to a third; the rest is noise."""
    planes = np.empty(planes_of(layout), np.uint8)
    if len(planes) == 1:
        planes[0] = values
    else:
        split_planes(values, planes)
    packed = [_shrink(plane) for plane in planes]
    if TAG_BYTES + sum(4 + len(plane) for plane in packed) >= bytes_of(layout):
        packed = list(planes)  # so no payload has the length of the block itself, and could be taken for one
    lengths = np.array([len(plane) for plane in packed], "<u4")
    return np.concatenate([_tag("lossless"), lengths.view(np.uint8), *packed])


def unpack_lossless(payload: Bytes, layout: KVLayout) -> Bytes:
    """-> the sender's values, in its dtype"""
    width, size = planes_of(layout)
    body = without_tag("lossless", payload)
    lengths = [int(length) for length in body[: 4 * width].view("<u4")]
    if sum(lengths) != len(body) - 4 * width:
        raise BadPayload(f"planes of {lengths} bytes in {len(body) - 4 * width}")
    planes = np.empty((width, size), np.uint8)
    start = 4 * width
    for plane, length in zip(planes, lengths, strict=True):
        plane[:] = _expand(body[start : start + length], size)
        start += length
    if width == 1:
        return planes.ravel()
    values = np.empty(width * size, np.uint8)
    merge_planes(planes, values)
    return values


def pack_fp16(values: Bytes, layout: KVLayout) -> Bytes:
    """Finite values beyond float16 saturate at its largest."""
    payload = empty_payload("fp16", layout)
    convert(values, layout.dtype, payload[TAG_BYTES:], "float16")
    return payload


def unpack_fp16(payload: Bytes, layout: KVLayout) -> Bytes:
    """-> values in float16"""
    return without_tag("fp16", payload)


def pack_scaled(codec: str, values: Bytes, layout: KVLayout) -> Bytes:
    """codec: int8 or fp8"""
    payload = empty_payload(codec, layout)
    scales, quantized = _scales_and_values(payload[TAG_BYTES:], layout)
    precise = as_dtype(values, layout.dtype, "float32", layout)
    quantize(precise, layout.head_dim, scales, quantized, _SCALED[codec])
    return payload


def unpack_scaled(codec: str, payload: Bytes, layout: KVLayout) -> Bytes:
    """-> values in float32"""
    scales, quantized = _scales_and_values(without_tag(codec, payload), layout)
    values = np.empty(bytes_of(layout, "float32"), np.uint8)
    dequantize(scales, quantized, layout.head_dim, values, _SCALED[codec])
    return values


@lru_cache(maxsize=64)
def payload_sizes(codec: str, layout: KVLayout) -> range:
    """The sizes that a payload of this codec can have. Empty if the codec does not pack such blocks."""
    if codec in LOSSY and layout.dtype == "int8":
        return range(0)
    if codec == CODEC_LOSSLESS:
        width, _ = planes_of(layout)
        return range(TAG_BYTES + 5 * width, TAG_BYTES + 4 * width + bytes_of(layout) + 1)
    scaled = TAG_BYTES + 4 * num_rows(layout) + num_values(layout)
    half = TAG_BYTES + bytes_of(layout, "float16")
    size = {CODEC_NONE: bytes_of(layout), "fp16": half, "int8": scaled, "fp8": scaled}[codec]
    return range(size, size + 1)


def as_dtype(values: Bytes, dtype: str, wanted: str, layout: KVLayout) -> Bytes:
    """Convert a block's bytes from one dtype to another; the same array if they are equal. Ignores `layout.dtype`."""
    if dtype == wanted:
        return values
    if dtype == "int8":
        scales, quantized = split_heads(values, layout.block_size, layout.head_dim)
        out = np.empty(bytes_of(layout, "float32"), np.uint8)
        dequantize(scales, quantized, layout.head_dim, out)
        return as_dtype(out, "float32", wanted, layout)
    if wanted == "int8":
        precise = as_dtype(values, dtype, "float32", layout)
        scales, quantized = np.empty(4 * num_rows(layout), np.uint8), np.empty(num_values(layout), np.uint8)
        quantize(precise, layout.head_dim, scales, quantized)
        return join_heads(scales, quantized, layout.block_size, layout.head_dim)
    out = np.empty(bytes_of(layout, wanted), np.uint8)
    convert(values, dtype, out, wanted)
    return out


def _scales_and_values(body: Bytes, layout: KVLayout) -> Sequence[Bytes]:
    return body[: 4 * num_rows(layout)], body[4 * num_rows(layout) :]


def _tag(codec: str) -> Bytes:
    return np.frombuffer(_TAGS[codec], np.uint8)


def _shrink(plane: Bytes) -> Bytes:
    """A zstd frame, or the plane itself if that is no longer."""
    if not hasattr(_local, "compressor"):
        # Level 1, but with hardly any search for repeats, since exponents have few values and no order. So almost only
        # the entropy coder runs, which is twice as fast, and a tenth shorter, than level 1 as it is.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1, window_log=19, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, write_checksum=False
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    frame = _local.compressor.compress(plane.data)
    return np.frombuffer(frame, np.uint8) if len(frame) < len(plane) else plane


def _expand(packed: Bytes, size: int) -> Bytes:
    """Exactly `size` bytes. A frame that announces another size is refused before memory is allocated for it."""
    if len(packed) == size:
        return packed
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    try:
        frame = zstandard.get_frame_parameters(packed.data)
        if frame.content_size != size or frame.window_size > _MAX_WINDOW_BYTES:
            raise BadPayload(f"a frame of {frame.content_size} bytes in a window of {frame.window_size}, wanted {size}")
        plane = _local.decompressor.decompress(packed.data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadPayload(str(error)) from error
    if len(plane) != size:
        raise BadPayload(f"{len(plane)} bytes, wanted {size}")
    return np.frombuffer(plane, np.uint8)
