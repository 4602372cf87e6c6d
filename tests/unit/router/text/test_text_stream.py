"""From token ids to what a client sees: special tokens, the end token, stop strings, min_tokens."""

import pytest

from kvasir.router.text.text_stream import TextRules, TextStream
from tests.tokenizers import byte_level

TOKENIZER = byte_level()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def show(text: str, rules: TextRules, end: str = "", one_by_one: bool = True) -> tuple[str, TextStream]:
    stream = TextStream(TOKENIZER, rules, frozenset(ids(end)))
    token_ids = ids(text)
    steps = [[token_id] for token_id in token_ids] if one_by_one else [token_ids]
    shown = ""
    for step in steps:
        shown += stream.push(step)
        if stream.is_stopped:
            break
    return shown + stream.flush(), stream


@pytest.mark.parametrize("one_by_one", [True, False])
def test_special_tokens_are_hidden_unless_asked_for(one_by_one: bool) -> None:
    assert show("a<|end|>b", TextRules(), one_by_one=one_by_one)[0] == "ab"
    assert show("a<|end|>b", TextRules(skip_special_tokens=False), one_by_one=one_by_one)[0] == "a<|end|>b"


def test_the_token_that_ends_the_sequence_is_not_shown() -> None:
    assert show("ab.", TextRules(), end=".")[0] == "ab"
    assert show("ab</s>", TextRules(skip_special_tokens=False), end="</s>")[0] == "ab"
    assert show("ab.", TextRules(include_stop_str_in_output=True), end=".")[0] == "ab."


def test_an_end_token_shows_what_was_kept_back_before_it() -> None:
    text, stream = show("ab<</s>", TextRules(stop=("<x",)), end="</s>")
    assert (text, stream.is_stopped) == ("ab<", False)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_special_token_is_a_stop_string_though_it_is_hidden(one_by_one: bool) -> None:
    text, stream = show("he<|end|>llo", TextRules(stop=("<|end|>",)), one_by_one=one_by_one)
    assert (text, stream.is_stopped) == ("he", True)
    assert stream.num_tokens == len(ids("he<|end|>"))


def test_a_special_token_spelt_out_in_plain_tokens_stops_too() -> None:
    stream = TextStream(TOKENIZER, TextRules(stop=("<|end|>",)))
    assert stream.push([*ids("he<"), *ids("|end|"), *ids(">"), *ids("llo")]) == "he"
    assert stream.is_stopped


@pytest.mark.parametrize("one_by_one", [True, False])
def test_only_tokens_up_to_the_stop_string_count(one_by_one: bool) -> None:
    text, stream = show("hello world", TextRules(stop=("o w",)), one_by_one=one_by_one)
    assert (text, stream.num_tokens) == ("hell", len(ids("hello w")))


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_stop_string_counts_only_after_min_tokens(one_by_one: bool) -> None:
    text, stream = show("a.b.c.d", TextRules(stop=(".",), min_tokens=4), one_by_one=one_by_one)
    assert (text, stream.num_tokens) == ("a.b.c", 6)


def test_a_character_cut_by_the_end_is_shown_once_and_may_not_hide_held_text() -> None:
    stream = TextStream(TOKENIZER, TextRules(stop=("<end",)))
    token_ids = [*ids("a<"), ids("é")[0]]
    assert "".join([*(stream.push([token_id]) for token_id in token_ids), stream.flush()]) == "a<\ufffd"
