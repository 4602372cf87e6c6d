"""Clients that send a byte at a time, or nothing, and more of them than there may be."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from kvasir.router.http_bounds import HttpBounds
from kvasir.router.http_server import running_http_server
from tests.unit.router.raw_http import read_to_end

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n"


async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers when the body is there."""
    while (message := await receive())["type"] == "http.request":
        if not message.get("more_body"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            return


@asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[int]:
    async with running_http_server(read_all, "127.0.0.1", 0, grace_s=1, bounds=HttpBounds(**bounds)) as server:
        yield server.port


async def drip(port: int, begin: bytes, every_s: float) -> bytes:
    """What comes back to one who sends a byte now and then until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)

    async def send() -> None:
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(every_s)
                writer.write(b"a")
                await writer.drain()

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(60):
            return await read_to_end(reader)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"", "head"),
        (b"POST /x HTTP/1.1\r\nhost: x\r\nx: ", "head"),
        (HEAD + b"\r\n", "body"),
        (HEAD.replace(b"content-length: 1000", b"transfer-encoding: chunked") + b"\r\n3e8\r\n", "body"),
    ],
    ids=["nothing", "head", "body", "chunk"],
)
async def test_one_who_drips_is_told_so_and_let_go(begin: bytes, part: str) -> None:
    async with serving(timeout_head_s=0.3, timeout_body_s=0.4) as port:
        head, _, body = (await drip(port, begin, every_s=0.1 if begin else 60)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(body)["error"]
        assert error["code"] == "request_timeout"
        assert part in error["message"]


async def test_one_who_is_slow_within_bounds_is_served_again_and_again() -> None:
    async with serving(timeout_head_s=60, timeout_body_s=60) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            for _ in range(3):
                for part in (b"POST /x HTTP/1.1\r\n", b"content-length: 4\r\n\r\n", b"ab", b"cd"):
                    writer.write(part)
                    await asyncio.sleep(0.02)
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_second_request_that_drips_is_let_go_too() -> None:
    async with serving(timeout_head_s=0.3) as port:
        answer = await drip(port, b"POST /x HTTP/1.1\r\ncontent-length: 1\r\n\r\naPOST /x", every_s=0.1)
        first, _, second = answer.partition(b"ok")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert second.startswith(b"HTTP/1.1 408 ")


async def test_one_who_has_his_answer_is_told_nothing_more() -> None:
    async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    bounds = HttpBounds(timeout_body_s=0.3)
    async with running_http_server(answer_at_once, "127.0.0.1", 0, grace_s=1, bounds=bounds) as server:
        answer = await drip(server.port, HEAD + b"\r\n", every_s=0.1)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.endswith(b"no")


async def test_more_connections_than_there_may_be_are_refused_until_one_ends() -> None:
    async with serving(limit_concurrency=2) as port, asyncio.timeout(60):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        head, _, body = (await drip(port, b"", every_s=60)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        held[0][1].close()
        request = b"POST /x HTTP/1.1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        while not (await drip(port, request, every_s=60)).startswith(b"HTTP/1.1 200 "):
            await asyncio.sleep(0.01)
        held[1][1].close()
