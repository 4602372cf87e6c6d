"""`kvasir chat`: a conversation in the terminal, over the OpenAI API."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvasir.bench.openai_client import first_model
from kvasir.bench.sse import EventReader
from kvasir.bench.timeline import Timeline

HELP = "/exit ends (so does Ctrl-D), /new begins a new conversation, Ctrl-C stops an answer"
_LONGEST_ERROR = 500


class ChatFailed(Exception):
    """What the server or the network said."""


@dataclass(eq=False)
class Conversation:
    """What has been said, and to whom."""

    url: str
    model: str
    system: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    is_cut: bool = False  # the last answer, at its longest
    is_thinking: bool = False

    def begin(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def answer(self, text: str) -> Timeline | None:
        """Prints the answer as it comes. What was printed stays part of the conversation, stopped or not."""
        self.messages.append({"role": "user", "content": text})
        sent_s = time.perf_counter()
        pieces: list[str] = []
        arrivals_s: list[float] = []
        num_tokens = 0
        self.is_cut = self.is_thinking = False
        try:
            async for piece in self._stream():
                num_tokens = piece.num_tokens or num_tokens
                self.is_cut |= piece.finish_reason == "length"
                if piece.text or piece.thought:
                    arrivals_s.append(time.perf_counter())
                    self._show(piece)
                    pieces.append(piece.text)
        finally:
            if answer := "".join(pieces):
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()
        if not arrivals_s:
            return None
        return Timeline(sent_s=sent_s, arrivals_s=tuple(arrivals_s), num_output_tokens=num_tokens or len(arrivals_s))

    def _show(self, piece: "Piece") -> None:
        """Thoughts are for who looks on: what a pipe carries is the answer alone."""
        if piece.thought and sys.stdout.isatty():
            self.is_thinking = True
            print(_dim(piece.thought), end="", flush=True)
        if piece.text:
            print("\n\n" if self.is_thinking else "", piece.text, sep="", end="", flush=True)
            self.is_thinking = False

    async def _stream(self) -> AsyncIterator["Piece"]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self.options}
        body["stream_options"] = {"include_usage": True}
        url = f"{self.url}/v1/chat/completions"
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=10)) as session,
            session.post(url, json=body, headers=self.headers) as response,
        ):
            if response.status != 200:
                raise ChatFailed(f"HTTP {response.status}: {_message_of(await response.text())}")
            reader = EventReader()
            async for chunk in response.content.iter_any():
                for data in reader.feed(chunk):
                    if data != "[DONE]":
                        yield _read_chunk(json.loads(data))


@dataclass(frozen=True, slots=True)
class Piece:
    """Of an answer."""

    text: str
    thought: str
    finish_reason: str | None
    num_tokens: int  # of the whole answer, once the server has said it; else 0


def _read_chunk(chunk: dict[str, Any]) -> Piece:
    if error := chunk.get("error"):
        raise ChatFailed(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    choice = (chunk.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    return Piece(
        text=delta.get("content") or "",
        thought=delta.get("reasoning_content") or delta.get("reasoning") or "",
        finish_reason=choice.get("finish_reason"),
        num_tokens=(chunk.get("usage") or {}).get("completion_tokens") or 0,
    )


def _message_of(body: str) -> str:
    """What an OpenAI error says; of any other body its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])[:_LONGEST_ERROR]
    except (ValueError, LookupError, TypeError):
        return body[:_LONGEST_ERROR]


def describe(timeline: Timeline) -> str:
    """TTFT 45 ms, 37.2 tokens/s (120 tokens)"""
    count = timeline.num_output_tokens
    speed = f", {1 / timeline.tpot_s:.1f} tokens/s" if timeline.tpot_s else ""
    return f"TTFT {timeline.ttft_s * 1e3:.0f} ms{speed} ({count} token{'s' if count != 1 else ''})"


def talk(conversation: Conversation, lines: Iterable[str]) -> int:
    """Until there are no more lines, or /exit. 1 if the last answer has failed: for who sends lines by a pipe."""
    conversation.begin()
    status = 0
    for line in lines:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/new":
            conversation.begin()
        elif text.startswith("/"):
            print(HELP)
        elif text:
            status = _answer(conversation, text)
    return status


def _answer(conversation: Conversation, text: str) -> int:
    try:
        timeline = asyncio.run(conversation.answer(text))
    except KeyboardInterrupt:
        print(_dim("\n[stopped]"))
        return 0
    except (ChatFailed, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        print(f"\nerror: {error or type(error).__name__}", file=sys.stderr)
        return 1
    cut = ", cut at --max-tokens" if conversation.is_cut else ""
    print(_dim(f"\n[{describe(timeline)}{cut}]" if timeline else "[an empty answer]"))
    return 0


def _typed_lines() -> Iterable[str]:
    import readline  # noqa: F401 - imported for what it does to input(): editing and history

    while True:
        try:
            yield input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    url = options.url if "://" in options.url else f"http://{options.url}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = options.model or asyncio.run(_first_model(url, headers))
    except ValueError as error:
        print(f"kvasir chat: {error}\n{_advice(error.__cause__)}", file=sys.stderr)
        return 1
    conversation = Conversation(
        url=url,
        model=model,
        system=options.system,
        headers=headers,
        options={"temperature": options.temperature, "max_completion_tokens": options.max_tokens},
    )
    if not sys.stdin.isatty():
        return talk(conversation, sys.stdin)
    print(f"{model} at {url}. {HELP}.")
    return talk(conversation, _typed_lines())


def _advice(error: BaseException | None) -> str:
    if isinstance(error, aiohttp.ClientResponseError) and error.status == 401:
        return "It wants a key: --api-key, or OPENAI_API_KEY in the environment."
    return "Is a server running there? `kvasir serve` starts one."


async def _first_model(url: str, headers: dict[str, str]) -> str:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        return await first_model(session, url, headers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvasir chat", description="Talk with a model in the terminal.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its name for the API (default: the first that the server lists)")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    return parser
