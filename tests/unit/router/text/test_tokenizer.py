"""Where a BOS token comes from, and what is refused."""

from pathlib import Path

import pytest

from kvasir.router.text.token_bytes import UnsupportedTokenizer
from kvasir.router.text.tokenizer import TextTokenizer
from tests.tokenizers import byte_level

TOKENIZER = byte_level()
[BOS] = TOKENIZER.encode("<s>", add_special_tokens=False)


@pytest.mark.parametrize("text", ["hello", "<s>hello"])
def test_a_prompt_has_exactly_one_bos(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=True)
    assert token_ids.count(BOS) == 1
    assert token_ids[0] == BOS


def test_template_text_gets_no_bos_that_it_does_not_hold() -> None:
    assert BOS not in TOKENIZER.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize("text", ["hello world", "hello world " * 1000])
async def test_a_long_text_gives_the_same_ids_off_the_loop(text: str) -> None:
    assert await TOKENIZER.encode_off_loop(text, add_special_tokens=True) == TOKENIZER.encode(
        text, add_special_tokens=True
    )


def test_a_text_beyond_any_hope_is_known_without_tokenizing() -> None:
    assert TOKENIZER.must_exceed("x" * 10_000, num_tokens=100)
    assert not TOKENIZER.must_exceed("x" * 100, num_tokens=100)


def test_special_tokens_are_known() -> None:
    assert sorted(TOKENIZER.special_texts.values()) == ["</s>", "<s>", "<|end|>"]
    assert TOKENIZER.eos_token_ids == set(TOKENIZER.encode("</s>", add_special_tokens=False))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json cannot be read: EOF"):
        TextTokenizer.load(tmp_path)
