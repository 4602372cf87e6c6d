"""Codecs: what goes in comes out, as exactly as promised."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.cuda_blocks import DeviceBlocks
from kvasir.engine.kv_cache import KVCache
from kvasir.kv_connector.codec import decode, decode_into, encode, encode_from, max_payload_bytes
from kvasir.kv_connector.codec_packing import payload_sizes
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.forms import CODECS, is_exact
from kvasir.kv_connector.testing import LARGE, SMALL
from tests.unit.kv_connector.coding import (
    FLOATS,
    by_definition,
    bytes_of,
    carried,
    codecs,
    dtypes,
    header_of,
    largest_error,
    layouts,
    seeds,
    shape_of,
    some_block,
)


@settings(max_examples=200, deadline=None)
@given(codecs, layouts, dtypes, seeds)
def test_what_goes_in_comes_out(codec: str, layout: KVLayout, dtype: str, seed: int) -> None:
    block, into = some_block(layout, seed), replace(layout, dtype=dtype)
    arrived = carried(codec, block, layout, into)
    if codec in ("int8", "fp8"):
        assert bool(((arrived.double() - block.double()).abs() <= largest_error(codec, block, into)).all())
    else:
        assert torch.equal(arrived, by_definition(codec, block, into))
    if is_exact(codec, layout, into):
        assert bytes(bytes_of(arrived)) == bytes(bytes_of(block))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["none", "lossless"]), layouts, seeds, st.integers(0, 3))
def test_exact_codecs_bring_back_any_bits(codec: str, layout: KVLayout, seed: int, num_random: int) -> None:
    """NaN with payloads, denormals, all equal: of no number are they allowed to make another."""
    rng = np.random.default_rng(seed)
    data = np.zeros(layout.bytes_per_block, np.uint8)
    for start in rng.integers(0, len(data), num_random):
        data[start:] = rng.integers(0, 256, len(data) - start)
    payload = encode(codec, data.data, layout)
    assert payload.nbytes in payload_sizes(codec, layout)
    assert bytes(decode(header_of(codec, payload, layout), payload, layout)) == data.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_memory_that_packs_its_blocks_sends_and_takes_the_same_bytes(codec: str, dtype: str) -> None:
    layout = replace(LARGE, dtype=dtype)
    memory, device = KVCache(layout, 2, torch.device("cpu")), KVCache(layout, 2, torch.device("cpu"))
    device._beside = DeviceBlocks(device.data)  # as on a GPU
    for cache in (memory, device):
        cache.data[1] = some_block(layout)
    payload = encode_from(device, BlockId(1), codec)
    assert bytes(payload) == bytes(encode_from(memory, BlockId(1), codec))
    for cache in (memory, device):
        decode_into(cache, BlockId(0), header_of(codec, payload, layout), payload)
    assert torch.equal(memory.data, device.data)
    damaged = memoryview(bytes(8) + bytes(payload[8:]))
    if codec != "none":
        with pytest.raises(BadFrame, match="begins with"):
            decode_into(device, BlockId(1), header_of(codec, damaged, layout), damaged)
    assert torch.equal(memory.data, device.data)


def test_none_copies_nothing() -> None:
    block = bytes_of(some_block(SMALL))
    payload = encode("none", block, SMALL)
    assert payload is block
    assert decode(header_of("none", payload, SMALL), payload, SMALL) is payload


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_is_the_same_bytes_however_often_and_wherever_it_is_encoded(codec: str) -> None:
    block = bytes_of(some_block(LARGE))
    expected = bytes(encode(codec, block, LARGE))
    with ThreadPoolExecutor(4) as threads:
        payloads = list(threads.map(lambda _: bytes(encode(codec, block, LARGE)), range(16)))
        headers = [header_of(codec, memoryview(payload), LARGE) for payload in payloads]
        decoded = list(threads.map(lambda i: bytes(decode(headers[i], memoryview(payloads[i]), LARGE)), range(16)))
    assert set(payloads) == {expected}
    assert len(set(decoded)) == 1


@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_may_lie_anywhere_in_memory_and_be_read_only(codec: str) -> None:
    block = some_block(SMALL)
    payload = encode(codec, bytes_of(block), SMALL)
    header = header_of(codec, payload, SMALL)
    expected = bytes(decode(header, payload, SMALL))
    for offset in range(1, 5):
        buffer = memoryview(bytes(offset) + bytes(payload))
        assert bytes(decode(header, buffer[offset:], SMALL)) == expected
        shifted = memoryview(bytes(offset) + bytes(bytes_of(block)))
        assert bytes(encode(codec, shifted[offset:], SMALL)) == bytes(payload)


@settings(max_examples=50, deadline=None)
@given(codecs, layouts, seeds, st.data())
def test_what_lies_behind_the_last_token_changes_nothing_before_it(
    codec: str, layout: KVLayout, seed: int, data: st.DataObject
) -> None:
    """A prompt's last block is partial; behind it lies what an earlier owner left, or NaN."""
    num_tokens = data.draw(st.integers(1, layout.block_size))
    block, dirty = some_block(layout, seed), some_block(layout, seed)
    block[..., num_tokens:, :] = 0
    dirty[..., num_tokens:, :] = data.draw(st.sampled_from([torch.nan, torch.inf, 6e4, -1.0]))
    clean, arrived = carried(codec, block, layout), carried(codec, dirty, layout)
    assert torch.equal(clean[..., :num_tokens, :], arrived[..., :num_tokens, :])


def test_fp16_saturates_and_shows_what_is_not_finite() -> None:
    block = torch.zeros(shape_of(SMALL))
    block.view(-1)[:6] = torch.tensor([65519.0, 7e4, -3e38, torch.inf, -torch.inf, torch.nan])
    arrived = carried("fp16", block, SMALL).view(-1)[:6].tolist()
    assert arrived[:5] == [65504.0, 65504.0, -65504.0, torch.inf, -torch.inf]
    assert np.isnan(arrived[5])


def test_int8_shows_what_is_not_finite_in_its_row_alone() -> None:
    block = some_block(SMALL)
    block[0, 1, 0, 3, 5] = torch.nan
    arrived = carried("int8", block, SMALL)
    assert bool(arrived[0, 1, 0, 3].isnan().all())
    assert int(arrived.isnan().sum()) == SMALL.head_dim


def test_sizes_are_what_the_codecs_promise() -> None:
    block = bytes_of(some_block(LARGE))
    share = {codec: encode(codec, block, LARGE).nbytes / LARGE.bytes_per_block for codec in CODECS}
    assert share["none"] == 1
    assert 0.7 < share["lossless"] < 0.9
    assert 0.5 < share["fp16"] < 0.501
    assert 0.26 < share["int8"] == share["fp8"] < 0.27


@given(layouts, codecs, dtypes)
def test_no_block_is_larger_than_what_receivers_make_room_for(layout: KVLayout, codec: str, dtype: str) -> None:
    other = replace(layout, dtype=dtype)
    noise = np.random.default_rng(0).integers(0, 256, other.bytes_per_block).astype(np.uint8)
    payload = encode(codec, noise.data, other)
    assert payload.nbytes in payload_sizes(codec, other)
    assert payload.nbytes <= max_payload_bytes(layout)


def test_a_codec_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="none, lossless, fp16, int8, fp8"):
        encode("zip", memoryview(bytes(SMALL.bytes_per_block)), SMALL)
