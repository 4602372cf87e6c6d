"""Blocks of all layouts, what packs them, and a receiver that takes them through all its checks."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from kvasir.engine.blocks import KVLayout
from kvasir.kernels.kv_codec import convert_reference
from kvasir.kv_connector.base import BlockHeader, BlockKey, Frame
from kvasir.kv_connector.codec import decode, encode
from kvasir.kv_connector.forms import CODECS, DTYPES
from kvasir.kv_connector.header import Expected, checksum_of, pack, verify
from kvasir.kv_connector.testing import IDENTITY
from tests.unit.kernels.paged import in_dtype

KEY = BlockKey(bytes(range(32)))
FLOATS = tuple(dtype for dtype in DTYPES if dtype != "int8")
layouts = st.builds(
    lambda layers, heads, head_dim, block_size, dtype: KVLayout(
        num_layers=layers,
        num_kv_heads=heads,
        total_kv_heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    ),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 3, 5, 8, 17, 64]),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from(FLOATS),
)
codecs, dtypes, seeds = st.sampled_from(CODECS), st.sampled_from(FLOATS), st.integers(0, 2**32 - 1)


def shape_of(layout: KVLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim


def some_block(layout: KVLayout, seed: int = 0) -> torch.Tensor:
    """Values as a cache holds them: each channel of its own size, some of them much larger."""
    rng = torch.Generator().manual_seed(seed)
    channels = torch.exp2(torch.randint(-6, 7, (layout.head_dim,), generator=rng).float())
    return (torch.randn(shape_of(layout), generator=rng) * channels).to(getattr(torch, layout.dtype))


def bytes_of(block: torch.Tensor) -> memoryview:
    return block.contiguous().view(-1).view(torch.uint8).numpy().data


def block_of(data: memoryview, layout: KVLayout) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(getattr(torch, layout.dtype)).view(
        shape_of(layout)
    )  # fmt: skip


def header_of(codec: str, payload: memoryview, layout: KVLayout) -> BlockHeader:
    return BlockHeader(
        kv_identity=IDENTITY,
        layout=layout,
        key=KEY,
        num_tokens=layout.block_size,
        payload_bytes=payload.nbytes,
        checksum=checksum_of(payload),
        sender_epoch="e",
        codec=codec,
    )


def expected_by(layout: KVLayout) -> Expected:
    return Expected(kv_identity=IDENTITY, layout=layout, key=KEY, num_tokens=layout.block_size)


def carried(codec: str, block: torch.Tensor, layout: KVLayout, into: KVLayout | None = None) -> torch.Tensor:
    """As a receiver of layout `into` gets it, through all its checks."""
    into = into or layout
    payload = encode(codec, bytes_of(block), layout)
    header = verify(Frame(pack(header_of(codec, payload, layout)), payload), expected_by(into))
    decoded = decode(header, payload, into)
    assert decoded.nbytes == into.bytes_per_block
    return block_of(decoded, into)


def by_definition(codec: str, block: torch.Tensor, into: KVLayout) -> torch.Tensor:
    if codec == "fp16":
        block = convert_reference(block, torch.float16)
    return convert_reference(block, getattr(torch, into.dtype))


def largest_error(codec: str, block: torch.Tensor, into: KVLayout) -> torch.Tensor:
    """Half of a 127th of the row's largest value; of fp8 a 16th of the value, or half its smallest step. And the
    rounding of the dtype that it ends in."""
    values = block.double().abs()
    largest = values.amax(-1, keepdim=True)
    rounding = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "float16": 2.0**-10}[into.dtype]
    own = torch.maximum(values / 16, largest / 448 * 2.0**-10) if codec == "fp8" else largest / 127 * 0.5
    return own * 1.002 + largest * rounding + 2.0**-24


def quantized_block(block: torch.Tensor, layout: KVLayout) -> memoryview:
    """What an int8 cache of the layout holds of these values."""
    cache = in_dtype(block.float()[None], torch.int8)
    assert cache.nbytes == layout.bytes_per_block
    return bytes_of(cache)


int8_layouts = layouts.map(lambda layout: replace(layout, dtype="int8")).filter(
    lambda layout: layout.block_size * layout.head_dim % 4 == 0
)
