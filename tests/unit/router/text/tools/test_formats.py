"""Calls of tools are read out of a text, wherever its pieces are cut and wherever it ends."""

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.parts import CallArguments, CallEnd, CallStart, Content, Part, Reasoning
from kvasir.router.text.reasoning import ReasoningReader, Start
from kvasir.router.text.tools.format import ToolFormat
from kvasir.router.text.tools.formats import (
    TOOL_FORMATS,
    Hermes,
    ListOfCalls,
    Llama3Json,
    Mistral,
    OneCall,
    detect_format,
)
from tests.unit.router.text.joined_parts import joined

NASTY = {"q": 'Zü"}" </tool_call>\n{', "n": [1, {"a": None}], "f": "👩‍👧日", "e": "\\"}
ARGUMENTS = json.dumps(NASTY, ensure_ascii=False)
ESCAPED = '{ "q" : "\\u00fc\\"" }'
FIRST = f'{{"name": "get", "arguments": {ARGUMENTS}}}'
SECOND = f'{{"parameters": {ESCAPED}, "name": "set"}}'
TWO_CALLS = [("get", ARGUMENTS), ("set", ESCAPED)]
THOUGHT = "<think>\nfirst {\n\n<tool_call> no\n</think>\n\n"

Case = tuple[type[ToolFormat], str, str, list[tuple[str, str]]]
CASES: list[Case] = [
    (Hermes, f"Look:\n<tool_call>\n{FIRST}\n</tool_call>\n<tool_call>{SECOND}</tool_call>", "Look:", TWO_CALLS),
    (Hermes, f"<tool_call>{FIRST}}}\n</tool_call> then\n", "then\n", TWO_CALLS[:1]),
    (Hermes, f"<tool_call>{FIRST}<tool_call>{SECOND}", "", TWO_CALLS),
    (Hermes, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (Hermes, '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("get", '{"a": 1}')]),
    (Hermes, '<tool_call>{"name": "get", "arguments": null}</tool_call>', "", [("get", "{}")]),
    (Hermes, "a <tool_call>no call</tool_call> b", "a <tool_call>no call</tool_call> b", []),
    (Hermes, '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    (Hermes, "1 < 2 <tool", "1 < 2 <tool", []),
    (Llama3Json, f"{FIRST}; {SECOND};", "", TWO_CALLS),
    (Llama3Json, f" <|python_tag|>{FIRST}\n<|python_tag|>{SECOND}", "", TWO_CALLS),
    (Llama3Json, f"Well: <|python_tag|>{FIRST}\n\nDone.", "Well:Done.", TWO_CALLS[:1]),
    (Llama3Json, '{"name": "now"}', "", [("now", "{}")]),
    (Llama3Json, ' {"name": "Bob"}', ' {"name": "Bob"}', []),
    (Llama3Json, '{"name": "Bob", "age": 4}', '{"name": "Bob", "age": 4}', []),
    (Llama3Json, f"I say {FIRST}", f"I say {FIRST}", []),
    (Mistral, f"So:\n[TOOL_CALLS] [{FIRST}, {SECOND}]", "So:", TWO_CALLS),
    (Mistral, f"[TOOL_CALLS]get[ARGS]{ARGUMENTS}[TOOL_CALLS]set[CALL_ID]012345678[ARGS]{ESCAPED}", "", TWO_CALLS),
    (Mistral, f"[TOOL_CALLS] {FIRST}", "", TWO_CALLS[:1]),
    (Mistral, "[TOOL_CALLS]a name?{}", "a name?{}", []),
    (Mistral, "[TOOL_CALLS]" + "x" * 600 + "{}", "x" * 600 + "{}", []),
    (ListOfCalls, f"[{FIRST}, {SECOND}]", "", TWO_CALLS),
    (OneCall, f" {ARGUMENTS}\n", "", TWO_CALLS[:1]),
]


def read(kind: type[ToolFormat], pieces: list[str], *, is_cut: bool = False) -> list[Part]:
    tools = kind(["get"] if kind is OneCall else ["get", "set", "now"])
    reader = AnswerReader(ReasoningReader(Start.EITHER), tools)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.flush(is_cut=is_cut)
    return joined(parts)


def without_ids(parts: list[Part]) -> list[Part]:
    return [
        CallStart(part.index, f"id {part.index}", part.name) if isinstance(part, CallStart) else part for part in parts
    ]


def check_order(parts: list[Part]) -> None:
    """A call begins, has arguments and ends, in one go; only the last may lack its end."""
    open_call: int | None = None
    for part in parts:
        match part:
            case CallStart(index):
                assert open_call is None
                open_call = index
            case CallArguments(index) | CallEnd(index):
                assert open_call == index
                open_call = None if isinstance(part, CallEnd) else index
            case _:
                assert open_call is None


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    """Complete ones; each begins once, and in its turn."""
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.call_id for start in starts}) == len(starts)
    calls = []
    for part in parts:
        if isinstance(part, CallEnd):
            texts = [piece.text for piece in parts if isinstance(piece, CallArguments) and piece.index == part.index]
            calls.append((starts[part.index].name, "".join(texts)))
    return calls


def chopped(text: str, seed: int = 0) -> list[str]:
    """In pieces of 1 to 50 characters."""
    sizes = random.Random(seed)
    pieces = []
    while text:
        size = sizes.randint(1, 50)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["", "thinking"])
@pytest.mark.parametrize("cut", [lambda text: [text], list, chopped], ids=["whole", "chars", "pieces"])
def test_calls_and_content(case: Case, thought: str, cut: Callable[[str], list[str]]) -> None:
    kind, text, content, calls = case
    parts = read(kind, cut(thought + text))
    assert content_of(parts) == content
    assert calls_of(parts) == calls
    reasoning = [part.text for part in parts if isinstance(part, Reasoning)]
    assert reasoning == (["first {\n\n<tool_call> no"] if thought else [])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_parts_of_a_text_that_is_cut_anywhere_depend_on_the_text_alone(case: Case) -> None:
    kind, text, content, calls = case
    for length in range(len(text) + 1):
        for is_cut in (False, True):
            parts = without_ids(read(kind, [text[:length]], is_cut=is_cut))
            assert without_ids(read(kind, list(text[:length]), is_cut=is_cut)) == parts
            assert without_ids(read(kind, chopped(text[:length], length), is_cut=is_cut)) == parts
            assert calls_of(parts) == calls[: len(calls_of(parts))]
            if is_cut and calls:
                assert content.startswith(content_of(parts).rstrip())  # and no markup


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
                *(
                    "\n",
                    "[",
                    "]",
                    "{",
                    "}",
                    '"',
                    ":",
                    ",",
                    ";",
                    "\\",
                    " ",
                    "a",
                    '"name"',
                    '"arguments"',
                    '"get"',
                    "get",
                    FIRST,
                ),
            ]
        ),
        max_size=12,
    ),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_any_text_at_all_is_read_alike_in_any_pieces(name: str, words: list[str], seed: int, is_cut: bool) -> None:
    text = "".join(words)
    parts = without_ids(read(TOOL_FORMATS[name], [text], is_cut=is_cut))
    check_order(parts)
    assert without_ids(read(TOOL_FORMATS[name], list(text), is_cut=is_cut)) == parts
    assert without_ids(read(TOOL_FORMATS[name], chopped(text, seed), is_cut=is_cut)) == parts


@pytest.mark.parametrize("kind", [Hermes, Llama3Json, Mistral])
@given(text=st.text(alphabet="ab {}[]<>tol_c\n", max_size=40))
def test_text_without_calls_is_passed_on_whole(kind: type[ToolFormat], text: str) -> None:
    assert content_of(read(kind, list(text))) == text


def test_the_only_call_of_an_answer_ends_it() -> None:
    reader = AnswerReader(None, Hermes(["get"]), one_call=True)
    parts = [
        part for piece in chopped(f"<tool_call>{FIRST}</tool_call><tool_call>{SECOND}") for part in reader.push(piece)
    ]
    assert reader.is_done
    assert calls_of(parts + reader.flush(is_cut=False)) == TWO_CALLS[:1]


def test_mistrals_ids_are_what_its_templates_take() -> None:
    [start, *_] = read(Mistral, ["[TOOL_CALLS]get{}"])
    assert isinstance(start, CallStart)
    assert start.call_id.isalnum()
    assert len(start.call_id) == 9


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_a_template_says_which_format_its_model_writes(template: str, name: str | None) -> None:
    assert detect_format(template) == name
