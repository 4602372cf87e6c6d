"""What a model's text is made of: thoughts, content, calls of tools."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """`index` counts the calls of one answer, from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete."""

    index: int


Part: TypeAlias = Reasoning | Content | CallStart | CallArguments | CallEnd


def overlap(text: str, marker: str) -> int:
    """How long an end of `text` is a beginning of `marker`: ('a <to', '<tool>') -> 3"""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
