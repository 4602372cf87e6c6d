"""What is sent as bytes, not as requests: refused in OpenAI's body, and gathered within bounds."""

import asyncio
import itertools
import json
from contextlib import suppress

import pytest

from tests.unit.router.openai.conftest import running_router, saying

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"model": "m", "prompt": "p"}'


async def answer_to(port: int, *parts: bytes, then: bytes = b"", num_more: int = 0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(20):
            with suppress(ConnectionError):  # it may be refused before all is sent
                for part in itertools.chain(parts, itertools.repeat(then, num_more)):
                    writer.write(part)
                    await writer.drain()
            return await reader.read(1 << 16)
    finally:
        writer.close()


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n"])
async def test_what_is_no_http_is_refused_in_openais_body(sent: bytes) -> None:
    async with running_router(saying("x")) as router:
        head, _, body = (await answer_to(router.port, sent)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/json" in head
        assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health HTTP/1.1\r\nx: ",
        b"GET /health HTTP/1.1\r\nx: y\r\nz: ",
        b"GET /health?",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;",
    ],
    ids=["header", "second-header", "url", "trailer", "chunk-extension"],
)
async def test_nothing_is_gathered_without_end(begin: bytes) -> None:
    async with running_router(saying("x")) as router:
        answer = await answer_to(router.port, begin, then=b"a" * 32_768, num_more=64)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 "), answer[:200]


async def test_long_heads_and_bodies_within_the_bounds_are_fine() -> None:
    async with running_router(saying("x")) as router:
        ending = b"x: %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (b"y" * 60_000, 400_000)
        body = BODY + b" " * (400_000 - len(BODY))
        pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
        assert (await answer_to(router.port, HEAD, ending, *pieces)).startswith(b"HTTP/1.1 200 ")
