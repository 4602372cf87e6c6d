import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.common.tokens import pack_tokens, unpack_tokens


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_there_and_back(token_ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == tuple(token_ids)


def test_little_endian() -> None:
    assert pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_tokens(b"") == ()


def test_what_is_no_token_id_is_refused() -> None:
    for bad in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            pack_tokens(bad)
    with pytest.raises(ValueError, match="got 7 bytes"):
        unpack_tokens(bytes(7))
