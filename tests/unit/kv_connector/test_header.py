import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.common.hashing import block_hashes, root_hash
from kvasir.kv_connector.base import BlockHeader, BlockKey, Frame
from kvasir.kv_connector.errors import BadFrame
from kvasir.kv_connector.header import Expected, checksum_of, pack, unpack, verify
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.stored import before_payload, split, store_key
from kvasir.kv_connector.testing import IDENTITY, SMALL

KEY = BlockKey(bytes(32))
PAYLOAD = memoryview(bytes(range(256)) * (SMALL.bytes_per_block // 256))
HEADER = BlockHeader(
    kv_identity=IDENTITY,
    layout=SMALL,
    key=KEY,
    num_tokens=9,
    payload_bytes=PAYLOAD.nbytes,
    checksum=checksum_of(PAYLOAD),
    sender_epoch="e",
)
EXPECTED = Expected(kv_identity=IDENTITY, layout=SMALL, key=KEY, num_tokens=9)


def test_a_header_comes_back_as_it_was() -> None:
    assert unpack(pack(HEADER)) == HEADER
    assert verify(Frame(pack(HEADER), PAYLOAD), EXPECTED) == HEADER


@given(st.integers(0, len(pack(HEADER)) * 8 - 1))
def test_no_flipped_bit_of_a_header_goes_unseen(bit: int) -> None:
    data = bytearray(pack(HEADER))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadFrame) as caught:
        verify(Frame(bytes(data), PAYLOAD), EXPECTED)
    assert caught.value.reason is MissReason.HEADER


@given(st.binary(max_size=300), st.sampled_from([1, 64, 4096]))
def test_no_garbage_passes_for_a_stored_frame(data: bytes, alignment: int) -> None:
    with pytest.raises(BadFrame):
        verify(split(memoryview(data), alignment), EXPECTED)


@given(st.integers(0, 10**6), st.sampled_from([1, 64, 4096]))
def test_no_torn_value_passes_for_a_stored_frame(cut: int, alignment: int) -> None:
    stored = before_payload(Frame(pack(HEADER), PAYLOAD), alignment) + bytes(PAYLOAD)
    assert verify(split(memoryview(stored), alignment), EXPECTED) == HEADER
    with pytest.raises(BadFrame):
        verify(split(memoryview(stored)[: cut % len(stored)], alignment), EXPECTED)


def test_stored_names_tell_apart_what_must_not_be_mixed() -> None:
    names = {
        store_key(KEY, SMALL),
        store_key(BlockKey(b"\1" * 32), SMALL),
        store_key(KEY, SMALL, "int8-float32"),
        store_key(KEY, replace(SMALL, dtype="bfloat16")),
        store_key(KEY, replace(SMALL, first_kv_head=1)),
    }
    assert len(names) == 5


def test_every_process_gives_a_prompt_the_same_names() -> None:
    """Seen elsewhere: a hash chain seeded per process, so that no instance ever hit what another had stored."""
    code = (
        "from kvasir.common.hashing import block_hashes, root_hash\n"
        "from kvasir.kv_connector.stored import store_key\n"
        "from kvasir.kv_connector.testing import IDENTITY, SMALL\n"
        "print(*(store_key(h, SMALL) for h in block_hashes(root_hash(IDENTITY, 'salt'), range(64), 16)))"
    )
    ours = [store_key(BlockKey(h), SMALL) for h in block_hashes(root_hash(IDENTITY, "salt"), range(64), 16)]
    for seed in ("0", "random"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(path for path in sys.path if path)}
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
        )
        assert output.stdout.decode().split() == ours
    assert len(set(ours)) == 4
