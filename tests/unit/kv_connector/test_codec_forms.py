"""Blocks between caches of different dtypes: what is exact, and under which name it is kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.engine.blocks import KVLayout
from kvasir.engine.kv_cache import cache_shape
from kvasir.kernels.kv_codec import convert_reference
from kvasir.kernels.kv_rows import read_rows
from kvasir.kv_connector.base import Frame
from kvasir.kv_connector.codec import decode, encode
from kvasir.kv_connector.codec_packing import payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.forms import CODECS, DTYPES, LOSSY, STORED_FORMS, codec_for, is_exact, stored_as
from kvasir.kv_connector.header import pack, verify
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.stored import store_key
from kvasir.kv_connector.testing import SMALL
from tests.unit.kv_connector.coding import (
    KEY,
    block_of,
    bytes_of,
    codecs,
    dtypes,
    expected_by,
    header_of,
    int8_layouts,
    largest_error,
    quantized_block,
    seeds,
    some_block,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["none", "lossless"]), int8_layouts, dtypes, seeds)
def test_blocks_of_an_int8_cache(codec: str, layout: KVLayout, dtype: str, seed: int) -> None:
    """Two such nodes exchange exact bytes; a node of another dtype gets the values that the bytes stand for."""
    into = replace(layout, dtype=dtype)
    sent = quantized_block(some_block(into, seed), layout)
    payload = encode(codec, sent, layout)
    header = verify(Frame(pack(header_of(codec, payload, layout)), payload), expected_by(into))
    assert bytes(decode(header, payload, layout)) == bytes(sent)
    held = torch.from_numpy(np.frombuffer(sent, np.int8).copy()).view(cache_shape(layout, 1))
    values = convert_reference(read_rows(held, torch.float32)[0], getattr(torch, dtype))
    assert torch.equal(block_of(decode(header, payload, into), into), values)
    assert is_exact(codec, layout, layout)
    assert not is_exact(codec, layout, into)
    assert not is_exact(codec, into, layout)


@settings(max_examples=100, deadline=None)
@given(codecs, int8_layouts, dtypes, seeds)
def test_blocks_for_an_int8_cache(codec: str, into: KVLayout, dtype: str, seed: int) -> None:
    layout = replace(into, dtype=dtype)
    block = some_block(layout, seed)
    payload = encode(codec, bytes_of(block), layout)
    received = decode(header_of(codec, payload, layout), payload, into)
    if codec in ("none", "lossless"):
        assert bytes(received) == bytes(quantized_block(block, into))
    held = torch.from_numpy(np.frombuffer(received, np.int8).copy()).view(cache_shape(into, 1))
    error = (read_rows(held, torch.float32)[0].double() - block.double()).abs()
    limit = largest_error(codec, block, layout) + largest_error("int8", block, layout)
    assert bool((error <= 1.07 * limit).all()), "packed twice; by the first time values may have grown by a 16th"


def test_lossy_codecs_leave_int8_blocks_as_they_are() -> None:
    layout = replace(SMALL, dtype="int8")
    for codec in LOSSY:
        assert codec_for(codec, layout) == "none"
        assert codec_for(codec, SMALL) == codec
        assert stored_as(codec, layout) == stored_as("none", layout) == "exact-int8"
        assert not payload_sizes(codec, layout)
        with pytest.raises(ValueError, match="packs no blocks of int8"):
            encode(codec, memoryview(bytes(layout.bytes_per_block)), layout)
        payload = memoryview(bytes(layout.bytes_per_block))
        with pytest.raises(BadFrame):
            decode(header_of(codec, payload, layout), payload, SMALL)
    assert codec_for("lossless", layout) == "lossless"


def test_only_what_the_receiver_would_have_computed_itself_is_exact() -> None:
    layouts_by_dtype = [replace(SMALL, dtype=dtype) for dtype in DTYPES]
    exact = {
        (codec, sender.dtype, into.dtype)
        for codec in CODECS
        for sender in layouts_by_dtype
        for into in layouts_by_dtype
        if is_exact(codec, sender, into)
    }
    assert exact == {(codec, dtype, dtype) for codec in ("none", "lossless") for dtype in DTYPES} | {
        ("fp16", "float16", "float16")
    }


def test_exact_blocks_of_one_dtype_share_a_name_and_no_others_do() -> None:
    assert stored_as("none", SMALL) == stored_as("lossless", SMALL) == "exact-float32"
    forms = {stored_as(codec, replace(SMALL, dtype=dtype)) for codec in CODECS for dtype in DTYPES}
    assert len(forms) == 4 + 2 * 3 + 2  # exact ones, int8 and fp8 of floats, fp16 of those that are not float16 already
    assert forms <= STORED_FORMS
    assert store_key(KEY, SMALL) == store_key(KEY, SMALL, stored_as("lossless", SMALL))
    assert len({store_key(KEY, SMALL, form) for form in forms}) == len(forms)


@pytest.mark.parametrize("form", ["../../etc/passwd", "exact-float64", "exact", "int8-float32\0", "EXACT-FLOAT32"])
def test_no_key_is_made_of_a_form_that_there_is_not(form: str) -> None:
    with pytest.raises(ValueError, match="stored as"):
        store_key(KEY, SMALL, form)


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"head_dim": 9}, {"block_size": 8}, {"num_layers": 3}])
def test_another_layout_than_ours_in_more_than_dtype_is_a_miss(change: dict[str, object]) -> None:
    layout = replace(SMALL, **change)
    payload = memoryview(bytes(SMALL.bytes_per_block))
    with pytest.raises(BadFrame) as caught:
        verify(Frame(pack(header_of("none", payload, layout)), payload), expected_by(SMALL))
    assert caught.value.reason is MissReason.LAYOUT
