"""The pieces, joined, are what the tokenizers library says of all ids at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvasir.router.text.detokenizer import Detokenizer
from kvasir.router.text.token_bytes import UnsupportedTokenizer
from kvasir.router.text.tokenizer import TextTokenizer
from tests.tokenizers import SPECIAL_TOKENS, byte_fallback, byte_level

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
SAMPLES = [
    "hello world",
    "  leading",
    "日本語のテキスト",
    "👩‍👩‍👧 family",
    "e\u0301 combining",
    "a\r\n\tb",
    "𝄞",
    "\ufffd real",
]


def pieces_of(tokenizer: TextTokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def ids_of_bytes(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    by_bytes = {tokenizer.bytes_of(token_id): token_id for token_id in range(3, 259)} | {
        tokenizer.bytes_of(token_id): token_id for token_id in range(256)
    }
    return [by_bytes[bytes([byte])] for byte in data]


@given(st.lists(st.integers(0, 261)))
def test_any_ids_give_what_the_library_gives(token_ids: list[int]) -> None:
    library = BYTE_LEVEL._tokenizer
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == library.decode(token_ids, skip_special_tokens=False)


@given(st.binary())
def test_any_bytes_are_read_as_utf8_with_replacement(data: bytes) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        text = "".join(pieces_of(tokenizer, ids_of_bytes(tokenizer, data)))
        assert text == data.decode(errors="replace")


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_text_survives_the_round_trip_without_replacement_inside(tokenizer: TextTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""


def test_a_character_comes_when_it_is_complete() -> None:
    assert pieces_of(BYTE_LEVEL, ids_of_bytes(BYTE_LEVEL, "é👍".encode())) == ["", "é", "", "", "", "👍", ""]


@pytest.mark.parametrize("tail", [b"\xc3", b"\xf0\x9f", b"\xf0\x9f\x91"])
def test_an_incomplete_tail_is_one_replacement_at_the_end(tail: bytes) -> None:
    pieces = pieces_of(BYTE_LEVEL, ids_of_bytes(BYTE_LEVEL, b"ok" + tail))
    assert pieces == ["o", "k", *[""] * len(tail), "\ufffd"]


@pytest.mark.parametrize("bad", [b"\xc0\x80", b"\xed\xa0\x80", b"\xff" * 50, b"\x80" * 50])
def test_bytes_that_are_no_utf8_do_not_stall_the_text_after_them(bad: bytes) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        pieces = pieces_of(tokenizer, ids_of_bytes(tokenizer, bad + b"ok"))
        assert pieces[-3:] == ["o", "k", ""]
        assert set("".join(pieces[:-3])) == {"\ufffd"}


def test_text_after_a_prompt_keeps_its_leading_space() -> None:
    token_ids = BYTE_FALLBACK.encode("▁he", add_special_tokens=False)
    assert "".join(pieces_of(BYTE_FALLBACK, token_ids)) == " he"


def test_an_id_of_the_models_padding_has_no_text() -> None:
    assert pieces_of(BYTE_LEVEL, [70_000]) == ["", ""]


def test_an_unknown_decoder_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        TextTokenizer(tokenizer, SPECIAL_TOKENS)
