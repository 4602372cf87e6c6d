"""Thoughts and answers, wherever the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.parts import Content, Part, Reasoning
from kvasir.router.text.reasoning import ReasoningReader, Start, start_of_answer
from tests.unit.router.text.joined_parts import joined


def read(start: Start, pieces: list[str], *, is_cut: bool = False) -> list[Part]:
    reader = AnswerReader(ReasoningReader(start))
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined(parts + reader.flush(is_cut=is_cut))


@pytest.mark.parametrize(
    ("start", "text", "thought", "answer"),
    [
        (Start.EITHER, "<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
        (Start.EITHER, " \n<think></think>c", "", "c"),
        (Start.EITHER, " c <think>d</think>", "", " c <think>d</think>"),
        (Start.EITHER, "", "", ""),
        (Start.EITHER, "<th", "", "<th"),
        (Start.THINKING, "a\n</think>\n\nc", "a", "c"),
        (Start.THINKING, "<think>a</think>c", "a", "c"),
        (Start.THINKING, "a < b </thin", "a < b </thin", ""),
        (Start.THINKING, "a\n", "a\n", ""),
        (Start.THINKING, "a</think>b</think>c", "a", "b</think>c"),
        (Start.ANSWERING, "\n<think>c", "", "\n<think>c"),
    ],
)
def test_thoughts_and_answer(start: Start, text: str, thought: str, answer: str) -> None:
    expected = [Reasoning(thought)] * bool(thought) + [Content(answer)] * bool(answer)
    assert read(start, [text]) == expected
    assert read(start, list(text)) == expected


def test_half_a_marker_is_not_shown_where_the_limit_cut_it() -> None:
    assert read(Start.THINKING, ["a </th"], is_cut=True) == [Reasoning("a ")]
    assert read(Start.EITHER, ["<thi"], is_cut=True) == []


@given(
    st.sampled_from(Start),
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "<", "</thi", "é"]), max_size=10),
    st.booleans(),
)
def test_any_text_is_read_alike_in_any_pieces(start: Start, words: list[str], is_cut: bool) -> None:
    text = "".join(words)
    parts = read(start, [text], is_cut=is_cut)
    assert read(start, words, is_cut=is_cut) == parts
    assert read(start, list(text), is_cut=is_cut) == parts


@pytest.mark.parametrize(
    ("prompt", "thinks_first", "start"),
    [
        ("<|im_start|>assistant\n<think>\n", False, Start.THINKING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", True, Start.ANSWERING),
        ("<|im_start|>assistant\n", False, Start.EITHER),
        ("<|im_start|>assistant\n", True, Start.THINKING),
    ],
)
def test_the_prompt_says_where_the_answer_begins(prompt: str, thinks_first: bool, start: Start) -> None:
    assert start_of_answer(prompt, thinks_first=thinks_first) is start
