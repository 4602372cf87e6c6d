"""An OpenAI server that answers by a script, and says how much memory it holds."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = ("The", " answer", " is", " 42", ".")


@dataclass
class ScriptedServer:
    """Chunks of WORDS with `gap_s` between them; then one that only closes, if it is to have one; then usage, if it is
    to say; then the end, if it is to come."""

    gap_s: float = 0.0
    closes: bool = False
    num_tokens: int = 7
    says_usage: bool = True
    ends: bool = True
    status: int = 200
    num_refused: int = 0  # the first ones, with 429
    fails_within: bool = False
    wants_key: bool = False  # to say what it serves
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    words: tuple[str, ...] = WORDS
    thoughts: tuple[str, ...] = ()  # before a chat's words
    resident_bytes: int | None = None
    leaks_bytes: int = 0  # with each look at /metrics
    url: str = ""
    num_looks: int = 0  # at /metrics
    # Whether this chunk of this request's answer may be sent yet, both counted from 0.
    may_send: Callable[[int, int], bool] = lambda number, chunk: True

    def answer_together(self, *groups: int) -> None:
        """Requests come in groups: nobody of one is answered before all of it are there."""
        ends = [sum(groups[: index + 1]) for index in range(len(groups)) for _ in range(groups[index])]
        self.may_send = lambda number, chunk: number >= len(ends) or len(self.bodies) >= ends[number]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, [{"text": word, "index": 0} for word in self.words])

    async def chat(self, request: web.Request) -> web.StreamResponse:
        speaker = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        thoughts = ({"index": 0, "delta": {"reasoning_content": thought}} for thought in self.thoughts)
        words = ({"index": 0, "delta": {"content": word}} for word in self.words)
        return await self._stream(request, [speaker, *thoughts, *words])

    async def models(self, request: web.Request) -> web.Response:
        if self.wants_key:
            raise web.HTTPUnauthorized
        return web.json_response({"data": [{"id": "scripted"}]})

    async def metrics(self, request: web.Request) -> web.Response:
        self.num_looks += 1
        if self.resident_bytes is None:
            raise web.HTTPNotFound
        self.resident_bytes += self.leaks_bytes
        return web.Response(
            text=f"# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes {self.resident_bytes:e}\n"
        )

    async def _whole(self, number: int, choices: list[dict[str, Any]]) -> web.Response:
        await self._until_it_may_send(number, 0)
        await asyncio.sleep(self.gap_s * len(choices))
        is_chat = "delta" in choices[0]
        text = "".join(choice["delta"]["content"] if is_chat else choice["text"] for choice in choices)
        answer = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": 11, "completion_tokens": self.num_tokens}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "length", **answer}], "usage": usage})

    async def _stream(self, request: web.Request, choices: list[dict[str, Any]]) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        status = 429 if len(self.bodies) <= self.num_refused else self.status
        if status != 200:
            return web.json_response({"error": {"message": "scripted"}}, status=status)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if not body.get("stream"):
                return await self._whole(number, choices)
            return await self._streamed(request, number, choices)
        finally:
            self.running -= 1

    async def _streamed(self, request: web.Request, number: int, choices: list[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk, choice in enumerate(choices):
            await self._until_it_may_send(number, chunk)
            await asyncio.sleep(self.gap_s)
            await self._send(response, {"choices": [choice]})
        if self.closes:
            empty = {"delta": {}} if "delta" in choices[0] else {"text": ""}
            await self._send(response, {"choices": [{"index": 0, "finish_reason": "length", **empty}]})
        if self.fails_within:
            await self._send(response, {"error": {"message": "lost a node"}})
        if self.says_usage:
            usage = {"prompt_tokens": 11, "completion_tokens": self.num_tokens}
            await self._send(response, {"choices": [], "usage": usage})
        if self.ends:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _until_it_may_send(self, number: int, chunk: int) -> None:
        while not self.may_send(number, chunk):
            await asyncio.sleep(0.001)

    async def _send(self, response: web.StreamResponse, message: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(message)}\n\n".encode())

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        return app
