import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvasir.common.metrics import Metrics
from kvasir.common.status_server import Health, StatusServer

WITHIN_S = 60
WELL = Health(True, "ok")


@asynccontextmanager
async def serving(health: Health = WELL) -> AsyncIterator[str]:
    metrics = Metrics()
    metrics.counter("kvasir:things", "Things.")(3)
    server = StatusServer(metrics, lambda: health)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.close()


async def talk(address: str, data: bytes) -> bytes:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WITHIN_S):
            writer.write(data)
            return await reader.read()
    except ConnectionError:  # cut off with some of our bytes unread
        return b""
    finally:
        writer.close()


async def test_metrics_and_health() -> None:
    async with serving() as address, httpx.AsyncClient(base_url=f"http://{address}", timeout=WITHIN_S) as client:
        metrics = await client.get("/metrics")
        assert "kvasir:things_total 3.0" in metrics.text
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        health = await client.get("/health?verbose=1")
        assert (health.status_code, health.text) == (200, "ok\n")
        assert (await client.head("/metrics")).text == ""
        assert (await client.get("/")).status_code == 404
        assert (await client.post("/metrics")).status_code == 405


async def test_a_sick_process_answers_503_with_the_reason() -> None:
    async with serving(Health(False, "the engine is dead")) as address, httpx.AsyncClient(timeout=WITHIN_S) as client:
        answer = await client.get(f"http://{address}/health")
        assert (answer.status_code, answer.text) == (503, "the engine is dead\n")


@pytest.mark.parametrize("garbage", [b"\r\n\r\n", b"hello\r\n\r\n", b"\xff\xfe\x00 / x\r\n\r\n", b"GET /\r\n\r\n"])
async def test_garbage_is_a_400(garbage: bytes) -> None:
    async with serving() as address:
        assert (await talk(address, garbage)).startswith(b"HTTP/1.1 400 ")


async def test_an_endless_header_is_cut_off_and_the_next_call_is_served() -> None:
    async with serving() as address:
        assert await talk(address, b"GET /metrics HTTP/1.1\r\n" + b"x" * 20_000) == b""
        assert (await talk(address, b"GET /health HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_close_does_not_wait_for_a_silent_connection() -> None:
    async with asyncio.timeout(WITHIN_S), serving() as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.05)
    writer.close()
