"""What all command lines of benchmarks have in common."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvasir.bench.command_line import new_parser, not_negative, options_of, positive, several
from kvasir.bench.markdown import facts, spread, table


@dataclass(frozen=True)
class Options:
    rounds: int
    rates: tuple[float, ...]
    name: str


def parser() -> argparse.ArgumentParser:
    parser = new_parser("thing", "`kvasir bench thing`: how a thing does.\n\nAnd why:\n- because.", "[NAME ...]")
    parser.add_argument("--rounds", type=positive(int), default=3, help="how many")
    parser.add_argument("--rates", type=several(positive(float)), default=(0.5, 2), metavar="X,..", help="requests/s")
    parser.add_argument("--wait-s", type=not_negative(float), default=0.0, help="seconds")
    parser.add_argument("--output", type=Path, help="folder")
    parser.add_argument("--model", help="its name (default: the first one)")
    parser.add_argument("--add", action="store_true", help="to what is there")
    return parser


def test_help_says_each_default_once_and_keeps_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = parser().format_help()
    description = "How a thing does.\n\nAnd why:\n\n- because.\n\n"
    assert text.startswith(f"usage: kvasir bench thing [OPTIONS] [NAME ...]\n\n{description}")
    for line in ("--rounds N   how many (default: 3)", "--rates X,..   requests/s (default: 0.5,2)"):
        assert " ".join(line.split()) in " ".join(text.split())
    for words in ("seconds (default: 0.0)\n", "folder\n", "its name (default: the first one)\n", "to what is there\n"):
        assert words in text
    assert "--output PATH" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rounds", "0"], "--rounds: must be positive, got 0"),
        (["--rounds", "few"], "--rounds: wants a number, got 'few'"),
        (["--rates", "1,,2"], "--rates: wants a number, got ''"),
        (["--rates", "nan"], "--rates: must be positive, got nan"),
        (["--wait-s", "-1"], "--wait-s: must not be negative, got -1"),
    ],
)
def test_a_wrong_value_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(argv)
    assert message in capsys.readouterr().err


def test_options_are_what_was_given_and_what_is_derived() -> None:
    given = parser().parse_args(["--rates", "1,2.5"])
    assert options_of(Options, given, name="derived") == Options(3, (1.0, 2.5), "derived")


def test_a_table_has_texts_on_the_left_and_numbers_on_the_right() -> None:
    lines = table(" | rounds | ms", [["a", 3, "1.0"], ["b", "", "-"]])
    assert lines == ["| | rounds | ms |", "|---|---:|---:|", "| a | 3 | 1.0 |", "| b | | - |"]
    assert table("a | b", [], num_texts=2)[1] == "|---|---|"


def test_facts_and_spreads() -> None:
    assert facts({"load_at_end": 0.5, "cores": 2}) == "load at end 0.5, cores 2"
    assert spread([3.0, 1.0, 2.25], 2) == "2.25 (1.00 to 3.00)"
