"""What is sent as bytes, not as requests: refused in OpenAI's body, and gathered within bounds."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from tests.unit.router.openai.conftest import running_router, saying
from tests.unit.router.raw_http import read_to_end

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"model": "m", "prompt": "p"}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port() -> AsyncIterator[int]:
    async with running_router(saying("hello")) as router:
        yield router.port


async def answer_to(port: int, *parts: bytes, then: bytes = b"", num_more: int = 0) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            with suppress(ConnectionError):  # it may be refused before all is sent
                for part in itertools.chain(parts, itertools.repeat(then, num_more)):
                    writer.write(part)
                    await writer.drain()
            return await read_to_end(reader)
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


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEA\r\n"
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
CLOSING = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids=["bytes", "pieces", "whole"])
@pytest.mark.parametrize("request_", [LENGTH + BODY, CHUNKED], ids=["length", "chunked"])
async def test_an_upgrade_is_not_taken_and_the_request_is_answered(port: int, request_: bytes, size: int) -> None:
    """As `curl --http2` and Java's HttpClient ask. The body was lost, and what followed the head was a new request."""
    sent = (HEAD + UPGRADE + request_) * 2 + CLOSING
    answer = await answer_to(port, *(sent[at : at + size] for at in range(0, len(sent), size)))
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"text":"hello"') == 2
    assert answer.count(b'"version"') == 1


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["bytes", "whole"])
async def test_the_body_behind_an_upgrade_is_never_a_request(port: int, size: int) -> None:
    inner = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    sent = HEAD + UPGRADE + b"content-length: %d\r\n\r\n" % len(inner) + inner + CLOSING
    answer = await answer_to(port, *(sent[at : at + size] for at in range(0, len(sent), size)))
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b'"version"') == 1  # what was asked for behind the body


@pytest.mark.parametrize(
    ("path", "status"), [(b"/health", b"200"), (b"/v1/realtime", b"404"), (b"/v1/completions", b"405")]
)
async def test_a_web_socket_gets_an_ordinary_answer(
    port: int, path: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    offer = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\n\r\n"
    answer = await answer_to(port, b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + offer + CLOSING)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1 ") == 2
    assert "uvicorn" not in caplog.text


@pytest.mark.parametrize("sent", [b"CONNECT a:443 HTTP/1.1\r\nhost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_what_must_be_another_protocol_is_refused(port: int, sent: bytes) -> None:
    answer = await answer_to(port, sent, CLOSING)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_ends_its_side_is_answered(port: int) -> None:
    """What is gathered goes out before the connection closes by itself: as `nc -N` asks."""
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write_eof()
        async with asyncio.timeout(60):
            answer = await read_to_end(reader)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_who_speaks_http_1_0_gets_no_chunks(port: int) -> None:
    for body, is_streamed in ((BODY, False), (BODY[:-1] + b', "stream": true}', True)):
        sent = HEAD.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n" % len(body) + body
        head, _, answer = (await answer_to(port, sent)).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if is_streamed:
            assert answer.startswith(b"id: ")
            assert answer.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(answer)["object"] == "text_completion"
    head, _, answer = (await answer_to(port, b"HEAD / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert answer == b""
