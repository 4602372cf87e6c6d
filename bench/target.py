"""Whom a benchmark asks, and with what: the options that all of them have for it, by vLLM's names."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from kvasir.bench.command_line import json_object, options_of, pair, positive
from kvasir.bench.openai_client import DEFAULT_PATHS, Backend, Endpoint, first_model
from kvasir.bench.tokenizer import DirectoryTokenizer
from kvasir.bench.workload import Prompt, RandomLengths, random_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    base_url: str
    backend: Backend
    endpoint: str | None
    model: str | None
    tokenizer: Path | None
    ignore_eos: bool
    extra_body: dict[str, Any]  # of each request, besides its prompt
    headers: dict[str, str]

    def open_tokenizer(self) -> DirectoryTokenizer | None:
        return DirectoryTokenizer(self.tokenizer) if self.tokenizer else None

    async def resolve(self, session: aiohttp.ClientSession) -> Endpoint:
        """ValueError: no model was named, and the server names none."""
        return Endpoint(
            base_url=self.base_url,
            model=self.model or await first_model(session, self.base_url, self.headers),
            backend=self.backend,
            path=self.endpoint,
            headers=self.headers,
            extra_body=self.extra_body,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLengthOptions(TargetOptions):
    """Of random prompts that all have one length."""

    input_len: int
    output_len: int
    seed: int

    def prompts(self, count: int, tokenizer: DirectoryTokenizer | None, seed: int | None = None) -> list[Prompt]:
        """As ids where there is a tokenizer and no chat, so that the length is exact. Each seed gives others."""
        lengths = RandomLengths(input_len=self.input_len, output_len=self.output_len)
        as_ids = tokenizer is not None and self.backend == "openai"
        return random_prompts(count, lengths, self.seed if seed is None else seed, tokenizer, as_ids)


T = TypeVar("T", bound=TargetOptions)


def add_target_options(parser: argparse.ArgumentParser, ignore_eos: bool = False) -> None:
    """ignore_eos: whether all tokens asked for are generated where the command line does not say."""
    add = parser.add_argument_group("endpoint").add_argument
    add("--base-url", type=_base_url, default="http://127.0.0.1:8000", metavar="URL", help="the server")
    add("--backend", choices=list(DEFAULT_PATHS), default="openai", help="completions, or chat completions")
    add("--endpoint", metavar="PATH", help="of the API (default: the backend's)")
    add("--model", metavar="NAME", help="its name for the API (default: the first one that the server lists)")
    add("--tokenizer", type=Path, metavar="DIR", help="model directory, for random prompts of exact length")
    add("--header", type=pair, nargs="*", default=[], metavar="NAME=VALUE", help="sent with each request; "
        "Authorization with the key in OPENAI_API_KEY, if there is one")  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields added to each request")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=ignore_eos,
        help="generate all tokens asked for; a field that servers other than vLLM and Kvasir may refuse "
        f"(default: {'yes' if ignore_eos else 'no'})",
    )
    for name in ("--temperature", "--top-p", "--min-p"):
        add(name, type=float, help="sampling parameter; not sent unless given")
    add("--top-k", type=int, help="sampling parameter; not sent unless given")


def target_options_of(cls: type[T], given: argparse.Namespace, **derived: Any) -> T:
    """As `options_of`, of a parser that has the options of `add_target_options`."""
    sampling = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    extra_body = {name: value for name, value in sampling.items() if value is not None} | given.extra_body
    headers = dict(given.header)
    if (api_key := os.environ.get("OPENAI_API_KEY")) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {api_key}"
    return options_of(cls, given, extra_body=extra_body, headers=headers, **derived)


def _base_url(text: str) -> str:
    """As of OpenAI's clients, too, which have /v1 in it."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"wants http://HOST:PORT or https://HOST, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def add_length_options(add: Callable[..., Any], input_len: int, output_len: int) -> None:
    """For FixedLengthOptions."""
    add("--input-len", type=positive(int), default=input_len, help="tokens of a prompt; words without --tokenizer")
    add("--output-len", type=positive(int), default=output_len, help="tokens to generate")
    add("--seed", type=int, default=0, help="of the prompts; each is new, so that no prefix cache helps")
