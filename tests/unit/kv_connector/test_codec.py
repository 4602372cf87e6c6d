"""Codecs: what goes in comes out, as exactly as promised, and nothing else is ever taken for it."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.cuda_blocks import DeviceBlocks
from kvasir.engine.kv_cache import KVCache, cache_shape
from kvasir.kernels.kv_codec import convert_reference
from kvasir.kernels.kv_rows import read_rows
from kvasir.kv_connector.base import BlockHeader, BlockKey, Frame
from kvasir.kv_connector.codec import (
    CODECS,
    DTYPES,
    LOSSY,
    STORED_FORMS,
    codec_for,
    decode,
    decode_into,
    encode,
    encode_from,
    is_exact,
    max_payload_bytes,
    payload_sizes,
    stored_as,
)
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.header import Expected, checksum_of, pack, store_key, verify
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.testing import IDENTITY, LARGE, SMALL
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


def quantized_block(block: torch.Tensor, layout: KVLayout) -> memoryview:
    """What an int8 cache of the layout holds of these values."""
    cache = in_dtype(block.float()[None], torch.int8)
    assert cache.nbytes == layout.bytes_per_block
    return bytes_of(cache)


int8_layouts = layouts.map(lambda layout: replace(layout, dtype="int8")).filter(
    lambda layout: layout.block_size * layout.head_dim % 4 == 0
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


# What is damaged.


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_change_on_the_way_goes_unseen(codec: str, data: st.DataObject) -> None:
    payload = bytearray(encode(codec, bytes_of(some_block(SMALL)), SMALL))
    header = pack(header_of(codec, memoryview(payload), SMALL))
    kind = data.draw(st.sampled_from(["flip", "cut", "extend"]))
    reasons = {MissReason.TRUNCATED}
    if kind == "flip":
        bit = data.draw(st.integers(0, len(payload) * 8 - 1))
        payload[bit // 8] ^= 1 << bit % 8
        reasons = {MissReason.CHECKSUM}
    elif kind == "cut":
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    else:
        payload += data.draw(st.binary(min_size=1, max_size=50))
    with pytest.raises(BadFrame) as caught:
        verify(Frame(header, memoryview(payload)), expected_by(SMALL))
    assert caught.value.reason in reasons


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_sender_that_makes_nonsense_and_signs_it_is_survived(codec: str, data: st.DataObject) -> None:
    """The checksum is right, the payload is not: it is refused by name, or it is some block of the right size."""
    payload = bytearray(encode(codec, bytes_of(some_block(SMALL)), SMALL))
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(payload)))
        payload[start : start + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    header = header_of(codec, memoryview(payload), SMALL)
    frame, reason = Frame(pack(header), memoryview(payload)), None
    try:
        num_bytes = decode(verify(frame, expected_by(SMALL)), frame.payload, SMALL).nbytes
    except BadFrame as error:
        num_bytes, reason = 0, error.reason
    assert num_bytes == SMALL.bytes_per_block or reason in (MissReason.TRUNCATED, MissReason.CODEC)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("named", [*CODECS, "", "zip", "INT8"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_under_another_codecs_name_is_refused(codec: str, named: str, dtype: str) -> None:
    if named == codec:
        return
    layout = replace(SMALL, dtype=dtype)
    payload = encode(codec, bytes_of(some_block(layout)), layout)
    header = header_of(named, payload, layout)
    with pytest.raises(BadFrame) as caught:
        decode(verify(Frame(pack(header), payload), expected_by(SMALL)), payload, SMALL)
    assert caught.value.reason in (MissReason.TRUNCATED, MissReason.CODEC)
    with pytest.raises(BadFrame):
        decode(header, payload, SMALL)


def lossless_of(planes: list[bytes], layout: KVLayout = LARGE) -> memoryview:
    lengths = b"".join(len(plane).to_bytes(4, "little") for plane in planes)
    return memoryview(b"kvc-zstd" + lengths + b"".join(planes))


PLANE_BYTES = LARGE.bytes_per_block // 4


def frame_of_zeros(num_bytes: int, *, says_so: bool) -> bytes:
    """A few KB, however many."""
    stream = zstandard.ZstdCompressor().compressobj(**({"size": num_bytes} if says_so else {}))
    parts = [stream.compress(bytes(min(1 << 20, num_bytes - start))) for start in range(0, num_bytes, 1 << 20)]
    return b"".join(parts) + stream.flush()


def frame_with_a_wide_window(window_log: int) -> bytes:
    """Says to hold a plane, and does: one byte, so many times. By hand, since no compressor would ask for as much."""
    window = ((window_log - 10) << 3).to_bytes(1, "little")
    block = (PLANE_BYTES << 3 | 1 << 1 | 1).to_bytes(3, "little")  # the last one, one byte repeated
    return b"\x28\xb5\x2f\xfd\x80" + window + PLANE_BYTES.to_bytes(4, "little") + block + b"\0"


@pytest.mark.parametrize(
    "frame",
    [
        frame_of_zeros(128 << 20, says_so=True),
        frame_of_zeros(128 << 20, says_so=False),
        frame_of_zeros(PLANE_BYTES, says_so=False),
        frame_of_zeros(PLANE_BYTES + 1, says_so=True),
        frame_of_zeros(PLANE_BYTES - 1, says_so=True),
        frame_of_zeros(PLANE_BYTES, says_so=True)[:-1],
        frame_of_zeros(PLANE_BYTES, says_so=True) + frame_of_zeros(PLANE_BYTES, says_so=True),
        frame_with_a_wide_window(27),
        b"\x28\xb5\x2f\xfd",
        b"",
    ],
    ids=["bomb", "mute bomb", "mute", "more", "less", "torn", "two", "wide", "magic", "empty"],
)
def test_a_frame_that_is_not_a_plane_is_refused_and_takes_no_memory(frame: bytes) -> None:
    payload = lossless_of([bytes(PLANE_BYTES)] * 3 + [frame])
    tracemalloc.start()
    with pytest.raises(BadFrame) as caught:
        decode(header_of("lossless", payload, LARGE), payload, LARGE)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason is MissReason.CODEC
    assert peak_bytes < 4 * LARGE.bytes_per_block


@pytest.mark.parametrize("frame", [frame_of_zeros(PLANE_BYTES, says_so=True), frame_with_a_wide_window(20)])
def test_any_compressors_frame_of_a_plane_is_read(frame: bytes) -> None:
    payload = lossless_of([bytes(PLANE_BYTES)] * 3 + [frame])
    assert bytes(decode(header_of("lossless", payload, LARGE), payload, LARGE)) == bytes(LARGE.bytes_per_block)


def test_a_size_that_no_block_has_is_refused_by_the_header_alone() -> None:
    for codec in CODECS:
        for num_bytes in (0, payload_sizes(codec, SMALL)[0] - 1, payload_sizes(codec, SMALL)[-1] + 1, 2**63):
            header = header_of(codec, memoryview(b""), SMALL)._replace(payload_bytes=num_bytes)
            with pytest.raises(BadFrame) as caught:
                verify(Frame(pack(header), memoryview(b"")), expected_by(SMALL))
            assert caught.value.reason is MissReason.TRUNCATED


# What is exact, and under which name it is kept.


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


def test_a_codec_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="none, lossless, fp16, int8, fp8"):
        encode("zip", memoryview(bytes(SMALL.bytes_per_block)), SMALL)
