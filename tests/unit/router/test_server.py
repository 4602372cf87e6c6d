"""`python -m kvasir.router` as a process: how it refuses to start, and how it stops."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

REPO = Path(__file__).parents[3]
TIMEOUT_S = 60.0


@asynccontextmanager
async def router_process(*options: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvasir.router", "--grpc-listen", "127.0.0.1:0", *options,
        env={**inherited, "PYTHONPATH": str(REPO / "src"), **environment}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def url_of(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        while line := await process.stderr.readline():
            if b"http://" in line:
                return line.decode().split()[-1]
    raise AssertionError("the router did not start")


async def refusal(*options: str, **environment: str) -> str:
    async with router_process(*options, **environment) as process, asyncio.timeout(TIMEOUT_S):
        _, stderr = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"Traceback" not in stderr
    return stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_and_stops_with_status_0(model_dir: Path, number: signal.Signals) -> None:
    async with router_process("--model", str(model_dir), "--port", "0", "--served-model-name", "tiny") as process:
        async with httpx.AsyncClient(base_url=await url_of(process), timeout=60) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 503
        process.send_signal(number)
        async with asyncio.timeout(TIMEOUT_S):
            assert await process.wait() == 0


@pytest.mark.parametrize("keys", ['["one", "two"]', "one,two"])
async def test_keys_come_from_the_environment_too(model_dir: Path, keys: str) -> None:
    options = ("--model", str(model_dir), "--port", "0")
    async with (
        router_process(*options, KVASIR_ROUTER_API_KEY=keys) as process,
        httpx.AsyncClient(base_url=await url_of(process), timeout=60) as client,
    ):
        assert (await client.get("/v1/models")).status_code == 401
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_what_is_wrong_is_said_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    assert "--model" in await refusal()
    assert "tokenizer.json" in await refusal("--model", str(tmp_path))
    assert "--prt" in await refusal("--prt", "1")
    assert "api_key" in await refusal("--model", str(model_dir), KVASIR_ROUTER_API_KEY='[""]')
    broken = tmp_path / "template"
    broken.write_text("{% if %}")
    assert "error: " in await refusal("--model", str(model_dir), "--chat-template", str(broken))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "in use" in await refusal("--model", str(model_dir), "--port", str(port))
