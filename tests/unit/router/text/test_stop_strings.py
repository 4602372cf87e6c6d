"""Stop strings: found wherever the tokens are cut, and nothing that is not one is lost or sent twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.router.text.stop_strings import StopStrings


def run(pieces: list[str], stops: list[str], include: bool = False) -> list[str]:
    """What was passed on after each piece, and at the end."""
    matcher = StopStrings(stops, include)
    passed_on: list[str] = []
    for piece in pieces:
        passed_on.append(matcher.push(piece))
        if matcher.matched is not None:
            break
    return [*passed_on, matcher.flush()]


def test_no_character_of_a_stop_string_is_passed_on_early() -> None:
    assert run([*"ABCDEFGHIJK"], ["DEFGHIJ"]) == ["A", "B", "C", "", "", "", "", "", "", "", ""]


def test_an_included_stop_string_is_passed_on_once_and_whole() -> None:
    assert "".join(run([*"ABCDEFGHIJK"], ["DEFGHIJ"], include=True)) == "ABCDEFGHIJ"


def test_what_becomes_no_stop_string_is_not_lost() -> None:
    assert run([*"ABCDEFG"], ["DEFX"]) == ["A", "B", "C", "", "", "", "DEFG", ""]
    assert run([*"ABCDE"], ["DEFX"])[-1] == "DE"


def test_a_partial_match_of_the_second_stop_string_is_passed_on_once() -> None:
    """Held text was once sent on release and again with the next piece, when a second stop string was set."""
    assert "".join(run(["Bob", ": Hi", "! A", "lly", "\n", "x"], ["\n", "Alice:"])) == "Bob: Hi! Ally"


def test_a_match_may_begin_inside_one_piece_and_end_inside_another() -> None:
    assert "".join(run(["one.", " two.\n", "\nthree"], ["\n\n"])) == "one. two."
    assert "".join(run(["say stop now"], [" stop"])) == "say"


def test_the_first_complete_match_wins_and_of_two_the_longer() -> None:
    assert "".join(run(["xabcdy"], ["abcd", "bc"])) == "xa"
    assert "".join(run(["xabcy"], ["bc", "abc"])) == "x"


texts = st.text("ab<", max_size=30)


@given(
    texts,
    st.lists(st.text("ab<", min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(1, 5), min_size=30, max_size=30),
    st.booleans(),
)
def test_the_cuts_do_not_matter(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert (
        "".join(run(pieces, stops, include)) == "".join(run([*text], stops, include)) == expected(text, stops, include)
    )


def expected(text: str, stops: list[str], include: bool) -> str:
    """By definition: the shortest beginning of the text that ends with a stop string, without the longest such."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[:end] if include else text[: end - max(map(len, ending))]
    return text


@pytest.mark.parametrize("stops", [["<|end|>"], ["b<|end|>c"]])
def test_hidden_text_is_matched_and_not_passed_on(stops: list[str]) -> None:
    matcher = StopStrings(stops)
    parts = [
        matcher.push("ab"),
        matcher.push("<|end|>", shown=False),
        matcher.push("c") if stops == ["b<|end|>c"] else "",
    ]
    assert matcher.matched == stops[0]
    assert "".join(parts) == ("ab" if stops == ["<|end|>"] else "a")


def test_hidden_text_that_is_no_stop_string_is_dropped() -> None:
    matcher = StopStrings(["<|end|>!"])
    assert [matcher.push("a"), matcher.push("<|end|>", shown=False), matcher.push("b")] == ["a", "", "b"]
