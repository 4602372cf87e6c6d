"""One request to an OpenAI endpoint, and when the chunks of its answer came, or the whole of it."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from kvasir.bench.sse import EventReader
from kvasir.bench.timeline import Timeline
from kvasir.bench.workload import Prompt

Backend = Literal["openai", "openai-chat"]
DEFAULT_PATHS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where requests go, and what each of them carries besides its prompt."""

    base_url: str
    model: str
    backend: Backend = "openai"
    path: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    streams: bool = True

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + (self.path or DEFAULT_PATHS[self.backend])

    def body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": self.streams}
        if self.streams:
            body["stream_options"] = {"include_usage": True}
        if self.backend == "openai-chat":
            if not isinstance(prompt.content, str):
                raise ValueError("a chat endpoint takes text, no token ids")
            body["messages"] = [{"role": "user", "content": prompt.content}]
            body["max_completion_tokens"] = prompt.num_output_tokens
        else:
            body["prompt"] = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
            body["max_tokens"] = prompt.num_output_tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra_body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request: a timeline, or an error."""

    sent_s: float
    timeline: Timeline | None = None
    text: str = ""
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, by the server's word
    token_ids: tuple[int, ...] = ()  # of the answer, where the server says them
    queued_s: float = 0.0  # how long it waited in the client for its turn


@dataclass(slots=True)
class _Answer:
    """What of a streamed answer has come so far."""

    arrivals_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int | None = None
    ended: bool = False
    closed_bare: bool = False  # its last chunk had a finish reason and no text
    error: str = ""

    def take(self, data: str, now_s: float) -> None:
        if data == "[DONE]":
            self.ended = True
            return
        self.take_chunk(json.loads(data), now_s)

    def take_chunk(self, chunk: Any, now_s: float) -> None:
        """Of a stream; or a whole answer, which is one chunk."""
        if not isinstance(chunk, dict):
            raise ValueError(f"no JSON object: {str(chunk)[:_LONGEST_ERROR]}")
        if error := chunk.get("error"):
            self.error = f"error within the stream: {json.dumps(error)[:_LONGEST_ERROR]}"
        if choices := chunk.get("choices"):
            self._take_choice(choices[0], now_s)
        if usage := chunk.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens")
            self.num_output_tokens = usage.get("completion_tokens")
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or ""
        if choice.get("finish_reason"):
            self.ended = True
            self.closed_bare = not text
        elif delta.get("role") and not text:
            return  # announces the speaker; it can be sent before any token is there, so it is none
        # The text may well be empty: special tokens have none.
        self.arrivals_s.append(now_s)
        self.texts.append(text)
        self.token_ids += choice.get("token_ids") or ()


def open_session() -> aiohttp.ClientSession:
    # As many connections as requests: a limit here would be mistaken for a slow server.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=6 * 3600), read_bufsize=1 << 20
    )


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    prompt: Prompt,
    count_tokens: Callable[[str], int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Never raises for what the server or the network did: that is an outcome, too."""
    body = endpoint.body(prompt)
    answer = _Answer()
    sent_s = clock()
    try:
        async with session.post(endpoint.url, json=body, headers=endpoint.headers) as response:
            if response.status != 200:
                detail = (await response.text())[:_LONGEST_ERROR]
                return Outcome(sent_s=sent_s, error=f"HTTP {response.status} {response.reason}: {detail}")
            if not endpoint.streams:
                answer.take_chunk(await response.json(), clock())
                return _outcome(sent_s, answer, prompt, count_tokens)
            reader = EventReader()
            async for chunk in response.content.iter_any():
                for data in reader.feed(chunk):
                    answer.take(data, clock())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return Outcome(sent_s=sent_s, error=f"{type(error).__name__}: {error}")
    return _outcome(sent_s, answer, prompt, count_tokens)


def _outcome(sent_s: float, answer: _Answer, prompt: Prompt, count_tokens: Callable[[str], int] | None) -> Outcome:
    text = "".join(answer.texts)
    if answer.error or not answer.ended or not answer.arrivals_s:
        missing = "the answer holds no chunk" if answer.ended else "the stream broke off before its end"
        return Outcome(sent_s=sent_s, text=text, error=answer.error or missing)
    num_output_tokens = answer.num_output_tokens
    if not num_output_tokens:  # the server does not say: count ourselves, as well as we can
        num_output_tokens = count_tokens(text) if count_tokens else len(answer.arrivals_s)
    arrivals_s = answer.arrivals_s
    if answer.closed_bare and len(arrivals_s) > max(1, num_output_tokens):
        arrivals_s = arrivals_s[:-1]  # all tokens came before it: it is not a hidden one, and no gap ends with it
    timeline = Timeline(sent_s=sent_s, arrivals_s=tuple(arrivals_s), num_output_tokens=num_output_tokens)
    return Outcome(
        sent_s=sent_s,
        timeline=timeline,
        text=text,
        num_prompt_tokens=answer.num_prompt_tokens or prompt.num_tokens or 0,
        num_cached_tokens=answer.num_cached_tokens,
        token_ids=tuple(answer.token_ids),
    )


async def first_model(session: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]) -> str:
    """The name of the first model that the server offers."""
    url = f"{base_url.rstrip('/')}/v1/models"
    try:
        async with session.get(url, headers=headers) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"cannot learn the model's name from {url}: {type(error).__name__}: {error}") from error
