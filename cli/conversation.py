"""A conversation over the OpenAI API, whose answers are printed as they arrive."""

import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvasir.bench.sse import EventReader
from kvasir.bench.timeline import Timeline

_LONGEST_ERROR = 500


class ChatFailed(Exception):
    """The server has answered with an error; the message is its own."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk of an answer."""

    text: str
    thought: str
    finish_reason: str | None
    num_tokens: int  # of the whole answer, once the server has said it; else 0


@dataclass(eq=False)
class Conversation:
    """What has been said so far, and the server that answers."""

    url: str
    model: str
    system: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    is_cut: bool = False  # the last answer reached its maximum length
    is_thinking: bool = False

    def begin(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def answer(self, text: str) -> Timeline | None:
        """Print the answer as it arrives. An answer that is stopped stays in the conversation as far as it came.

        None: the answer was empty. Raises ChatFailed, or what aiohttp raises.
        """
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

    def _show(self, piece: Piece) -> None:
        """Thoughts are shown on a terminal only; a pipe gets the answer alone."""
        if piece.thought and sys.stdout.isatty():
            self.is_thinking = True
            print(dim(piece.thought), end="", flush=True)
        if piece.text:
            print("\n\n" if self.is_thinking else "", piece.text, sep="", end="", flush=True)
            self.is_thinking = False

    async def _stream(self) -> AsyncIterator[Piece]:
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


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text
