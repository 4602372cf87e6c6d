"""A router of several processes, over fake nodes in the test's own process."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from tests.fake_engine import Fabric
from tests.fake_node import FakeNode
from tests.plain_http import NO_TLS
from tests.ports import held_port
from tests.tokenizers import save_byte_level

REPO = Path(__file__).parents[1]
TIMEOUT_S = 120.0  # processes start, one after the other, and again after a pause when they have been killed
LIMITS = {"few": {"requests_per_minute": 6}, "places": {"max_concurrent_requests": 4}, "a": {}, "b": {}}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class Workers:
    def __init__(self, process: asyncio.subprocess.Process, url: str, prefill: FakeNode, decode: FakeNode) -> None:
        self.process = process
        self.url = url
        self.prefill = prefill
        self.decode = decode

    def client(self, key: str = "a") -> httpx.AsyncClient:
        """With connections of its own: workers get them in turn."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, headers=headers, verify=NO_TLS)

    async def ask(self, method: str, path: str, key: str = "a", **json: Any) -> httpx.Response:
        """On a new connection."""
        async with self.client(key) as client:
            return await client.request(method, path, json=json or None)

    async def complete(self, key: str = "a", **body: Any) -> httpx.Response:
        return await self.ask(
            "POST", "/v1/completions", key, **{"model": "m", "prompt": "hello", "max_tokens": 4, **body}
        )

    async def metric(self, pattern: str) -> float:
        """The sum of all samples whose line begins with it."""
        text = (await self.ask("GET", "/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(pattern, line))

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if b"workers.worker" in _command_line(pid)]

    async def are_up_and_ready(self) -> bool:
        """Both of them, so that connections go to them in turn, and each serves. A process may be there before that."""
        try:
            is_each_up = await self.metric("kvasir:router_processes") == 2
            return is_each_up and all([await self.is_ready() for _ in range(2)])
        except httpx.TransportError:  # one that has just been killed was handed the connection
            return False

    async def until(self, condition: Callable[[], Any]) -> None:
        """`condition` may be a coroutine function."""
        end_s = time.monotonic() + TIMEOUT_S
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            assert time.monotonic() < end_s, "did not come true in time"
            await asyncio.sleep(0.05)

    async def is_ready(self) -> bool:
        return (await self.ask("GET", "/ready?prefill=1&decode=1")).status_code == 200


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@asynccontextmanager
async def running_workers(folder: Path, *options: str, is_static: bool = False) -> AsyncIterator[Workers]:
    """Two, ready. Keys are `a` and `b`, and `few` and `places`, which have limits."""
    keys = [{"name": key, "sha256": sha256(key.encode()).hexdigest(), **limits} for key, limits in LIMITS.items()]
    (folder / "keys.yaml").write_text(json.dumps(keys))
    save_byte_level(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    fabric = Fabric()
    async with AsyncExitStack() as stack:
        registry = f"127.0.0.1:{stack.enter_context(held_port())}"
        prefill = await stack.enter_async_context(FakeNode("prefill", fabric))
        decode = await stack.enter_async_context(FakeNode("decode", fabric))
        nodes = ["--prefill", prefill.address, "--decode", decode.address] if is_static else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvasir.router", "--model", str(folder), "--served-model-name", "m"),
            *("--port", "0", "--workers", "2", "--grpc-listen", registry, *nodes, *options),
            *("--api-key-file", str(folder / "keys.yaml")),
            # Silence means less here than on machines of their own.
            *("--heartbeat-timeout-s", "10"),
            *("--max-token-wait-s", "0"),  # an event a token, however busy the machine is
            env={k: v for k, v in os.environ.items() if not k.startswith("KVASIR_")}
            | {"PYTHONPATH": str(REPO / "src")},
            stderr=asyncio.subprocess.PIPE,
        )
        stack.push_async_callback(_kill, process)
        if not is_static:
            announcing = asyncio.create_task(_announce([prefill, decode], registry))
            stack.callback(announcing.cancel)
        assert process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            url, lines = "", []
            while not url:
                lines.append((await process.stderr.readline()).decode())
                assert lines[-1], "".join(lines)
                url = lines[-1].split()[-1] if "http://" in lines[-1] else ""
        reading = asyncio.create_task(_show(process.stderr))
        stack.callback(reading.cancel)
        workers = Workers(process, url, prefill, decode)
        await workers.until(workers.are_up_and_ready)
        yield workers


async def _announce(nodes: list[FakeNode], registry: str) -> None:
    while True:
        for node in nodes:
            with suppress(grpc.aio.AioRpcError):
                await node.announce(registry)
        await asyncio.sleep(0.2)


async def _show(stderr: asyncio.StreamReader) -> None:
    """So that the pipe does not fill, and a failed test shows it."""
    while line := await stderr.readline():
        print(line.decode(), end="")


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The workers notice by themselves."""
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
    await process.wait()
