"""The text of the quality report: English and code that is in this repository, or in Python itself."""

import argparse
import copy
import difflib
import doctest
import heapq
import pickle
import random
import statistics
import timeit
import unittest
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.router.text.chat_template import ChatTemplate, find_template
from kvasir.router.text.tokenizer import TextTokenizer

_REPO = Path(__file__).resolve().parents[2]
_MODULES = (argparse, statistics, copy, timeit, unittest, doctest, random, difflib, pickle)
_MOST_WORDS = 900  # of a passage
_CHAT_EVERY = 3
_ASK = "Explain the following text in your own words:\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    source: str
    is_chat: bool
    token_ids: tuple[int, ...]


def make_prompts(model: Path, num_prompts: int) -> list[Prompt]:
    """Passages to be continued, and every third one within a question in the model's chat format."""
    tokenizer = TextTokenizer.load(model)
    template = ChatTemplate(find_template(model) or "", tokenizer.special_tokens)
    prompts = []
    for i, (source, passage) in enumerate(some_passages(num_prompts)):
        is_chat = i % _CHAT_EVERY == 2
        text = template.render([{"role": "user", "content": _ASK + passage}]) if is_chat else passage
        token_ids = tokenizer.encode(text, add_special_tokens=not is_chat)
        prompts.append(Prompt(source, is_chat, tuple(token_ids)))
    tokenizer.close()
    return prompts


def some_passages(num_passages: int) -> list[tuple[str, str]]:
    """(document, passage): two of each document, a long one and the rest; then the same ones anew."""
    documents = {name: text.split(" ") for name, text in _documents()}
    names = list(documents)
    passages = []
    for i in range(num_passages):
        name = names[i % len(names)]
        words = documents[name]
        border = min(len(words) * 2 // 3, _MOST_WORDS)
        passage = words[:border] if i // len(names) % 2 == 0 else words[border : border + _MOST_WORDS]
        passages.append((name, " ".join(passage)))
    return passages


def _documents() -> Sequence[tuple[str, str]]:
    return (
        ("README.md", (_REPO / "README.md").read_text(encoding="utf-8")),
        ("LICENSE", (_REPO / "LICENSE").read_text(encoding="utf-8")),
        ("heapq", heapq.__about__),
        *((module.__name__, module.__doc__ or "") for module in _MODULES),
    )
