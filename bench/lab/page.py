"""What the measurements of this folder have in common: their command line, and a page of what they found."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir.bench.command_line import new_parser
from kvasir.bench.markdown import facts


def lab_parser(command: str, doc: str | None, positionals: str = "") -> argparse.ArgumentParser:
    """Has --output."""
    parser = new_parser(command, doc, positionals)
    help_ = "folder of the page, and of what belongs to it"
    parser.add_argument("--output", type=Path, default=Path("bench/results"), metavar="DIR", help=help_)
    return parser


def as_page(title: str, about: Mapping[str, object], lines: Sequence[str]) -> str:
    """about: of the machine."""
    return "\n".join([f"# {title}", "", facts(about), "", *lines, ""])


def write_page(folder: Path, name: str, text: str) -> None:
    """And prints it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    print(text)


def kept(folder: Path, name: str) -> dict[str, Any]:
    """What `keep` has left there; {}: nothing."""
    file = folder / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def keep(folder: Path, name: str, found: Mapping[str, Any], page: str) -> None:
    """The page; and beside it what it was made of, for later runs to add to."""
    write_page(folder, f"{name}.md", page)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
