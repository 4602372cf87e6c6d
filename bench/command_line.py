"""What the command lines of all benchmarks have in common: help, and the values of options."""

import argparse
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def new_parser(command: str, doc: str | None, positionals: str = "") -> argparse.ArgumentParser:
    """doc: of the module, which begins with "`kvasir bench COMMAND`: "; positionals: in the line of usage."""
    description = (doc or "").partition("`: ")[2].strip()
    return argparse.ArgumentParser(
        prog=f"kvasir bench {command}",
        usage=f"%(prog)s [OPTIONS] {positionals}".rstrip(),
        description=description[:1].upper() + description[1:],
        formatter_class=_HelpFormatter,
    )


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps paragraphs, says each default that there is, and calls numbers N and X."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = re.split(r"\n\n|\n(?=- )", text)
        return "\n\n".join(super(_HelpFormatter, self)._fill_text(part, width, indent) for part in parts)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if "default" in text or default in ("", (), [], {}, argparse.SUPPRESS) or default is None or default is False:
            return text
        if isinstance(default, list | tuple):
            default = (" " if action.nargs else ",").join(map(str, default))
        return f"{text} (default: {default})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kind: Any = getattr(action.type, "kind", action.type)
        return {int: "N", float: "X", Path: "PATH"}.get(kind, action.dest.upper())


def options_of(cls: type[T], given: argparse.Namespace, **derived: Any) -> T:
    """A dataclass of what was given, by the names of its fields, but for those that are derived."""
    names = inspect.signature(cls).parameters.keys() - derived.keys()
    return cls(**{name: getattr(given, name) for name in names}, **derived)


@dataclass(frozen=True, slots=True)
class _Number:
    kind: type[int] | type[float]
    may_be_0: bool

    def __call__(self, text: str) -> float:
        try:
            value = self.kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"wants a number, got {text!r}") from error
        if not (value > 0 or (self.may_be_0 and value == 0)):
            wanted = "must not be negative" if self.may_be_0 else "must be positive"
            raise argparse.ArgumentTypeError(f"{wanted}, got {text}")
        return value


def positive(kind: type[int] | type[float]) -> Any:
    return _Number(kind, may_be_0=False)


def not_negative(kind: type[int] | type[float]) -> Any:
    return _Number(kind, may_be_0=True)


def several(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Values separated by commas."""
    return lambda text: tuple(map(parse, text.split(",")))


def pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"wants NAME=VALUE, got {text!r}")
    return name, value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"wants a JSON object, got {text!r}")
    return value
