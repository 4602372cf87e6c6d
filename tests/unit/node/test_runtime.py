"""A node's process life, in this process: started, probed, stopped, crashed. The model is a fake, the rest is real."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvasir.cli.ports import free_port
from kvasir.common.grpc_client import open_channel
from kvasir.decode_node.config import DecodeConfig
from kvasir.decode_node.node import DecodeNode
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.node.runtime import NodeKind, NodeProcess, health_of, run_node
from kvasir.proto import common_pb2, decode_pb2, decode_pb2_grpc
from tests.unit.node.fakes import (
    IDENTITY,
    KVRunner,
    Running,
    continue_decode,
    generate,
    parts,
    request,
    start_decode,
)

SECRET = "a secret of some length"
WITHIN_S = 60
STATUS = health_pb2.HealthCheckResponse

KIND = NodeKind(
    name="decode",
    service="kvasir.v1.DecodeService",
    make_node=lambda made: DecodeNode(made, admission_timeout_s=WITHIN_S),
    add_to_server=decode_pb2_grpc.add_DecodeServiceServicer_to_server,
)


class Process:
    """A node's `serve`, and what its neighbours see of it."""

    def __init__(self, config: DecodeConfig, runner: KVRunner, channel: Any) -> None:
        self.runner = runner
        self.channel = channel
        self.address = config.listen
        self.metrics_url = f"http://127.0.0.1:{config.metrics_port}"
        self.exit: asyncio.Task[int]

    async def grpc_health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        service = health_pb2.HealthCheckRequest(service=KIND.service)
        return int((await stub.Check(service, timeout=WITHIN_S, wait_for_ready=True)).status)

    async def exit_status(self) -> int:
        async with asyncio.timeout(WITHIN_S):
            return await self.exit

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Running]:
        stub = decode_pb2_grpc.DecodeServiceStub(self.channel)
        async with Running(None, self.runner, stub, decode_pb2.DecodeCommand).session() as running:
            yield running


@asynccontextmanager
async def process(**options: Any) -> AsyncIterator[Process]:
    config = DecodeConfig(model="/m", listen=f"127.0.0.1:{free_port()}", metrics_port=free_port(), **options)  # type: ignore[arg-type]
    made, runner = parts(ConnectorSettings(name="memory"))
    channel = open_channel(config.listen, SECRET)
    running = Process(config, runner, channel)
    serve = NodeProcess(config, KIND, made, SECRET).serve
    running.exit = asyncio.create_task(serve())
    try:
        async with asyncio.timeout(WITHIN_S):
            while await running.grpc_health() != STATUS.SERVING:
                await asyncio.sleep(0.01)
        yield running
    finally:
        await channel.close(None)
        if not running.exit.done():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(running.exit, return_exceptions=True)


async def test_it_says_who_it_is() -> None:
    async with process() as node:
        stub = decode_pb2_grpc.DecodeServiceStub(node.channel)
        described = (await stub.Describe(common_pb2.DescribeRequest(), timeout=WITHIN_S)).node
        assert described.role == common_pb2.ROLE_DECODE
        assert described.model_name == "fake"
        assert described.kv_identity == IDENTITY
        assert (described.block_size, described.num_total_blocks, described.max_model_len) == (4, 64, 200)
        assert (described.num_kv_heads, described.kv_cache_dtype) == (1, "float32")
        assert described.connector == "memory"
        assert described.metrics_address == node.metrics_url.removeprefix("http://")
        assert described.eos_token_ids == b"\1\0\0\0\3\0\0\0"


async def test_health_metrics_and_reflection_are_there() -> None:
    async with process() as node, httpx.AsyncClient(base_url=node.metrics_url, timeout=WITHIN_S) as client:
        assert (await client.get("/health")).text == "ok\n"
        metrics = (await client.get("/metrics")).text
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "kvasir:free_blocks"):
            assert f"\n{name}{{" in metrics
        stub = reflection_pb2_grpc.ServerReflectionStub(node.channel)
        call = stub.ServerReflectionInfo(timeout=WITHIN_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert "kvasir.v1.DecodeService" in names
        call.cancel()


async def test_sigterm_lets_requests_finish_and_exits_with_0() -> None:
    async with process() as node, node.session() as session:
        await session.send(**start_decode(1, request([1, 2], 20)))
        await session.until(lambda: 1 in session.admitted)
        os.kill(os.getpid(), signal.SIGTERM)
        await session.until(lambda: session.heartbeat is not None and session.heartbeat.draining)
        assert await node.grpc_health() == STATUS.NOT_SERVING
        async with httpx.AsyncClient(timeout=WITHIN_S) as client:
            health = await client.get(f"{node.metrics_url}/health")
        assert (health.status_code, health.text) == (200, "draining\n")
        await session.send(**start_decode(2, request([1, 2], 20)))
        await session.ends(2)
        assert session.failed[2].code == common_pb2.FAILURE_CODE_DRAINING
        await session.send(**continue_decode(1, []))
        await session.ends(1)
        assert session.outputs[1] == generate([1, 2], 20)
        assert await node.exit_status() == 0


async def test_the_grace_ends_and_so_does_the_node() -> None:
    async with process(drain_grace_s=0.2) as node, node.session() as session:
        await session.send(**start_decode(1, request([1, 2], 20)))
        await session.until(lambda: 1 in session.admitted)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await node.exit_status() == 0


async def test_a_second_signal_cuts_the_drain_short() -> None:
    async with process(drain_grace_s=3600) as node, node.session() as session:
        await session.send(**start_decode(1, request([1, 2], 20)))
        await session.until(lambda: 1 in session.admitted)
        os.kill(os.getpid(), signal.SIGINT)
        await session.until(lambda: session.heartbeat is not None and session.heartbeat.draining)
        os.kill(os.getpid(), signal.SIGINT)
        assert await node.exit_status() == 0


async def test_a_crashed_engine_fails_its_requests_and_exits_with_1() -> None:
    async with process() as node, node.session() as session:

        def crash() -> None:
            raise ZeroDivisionError("a bug in a kernel")

        node.runner.before_step = crash
        await session.send(**start_decode(1, request([1, 2], 20)))
        await session.send(**continue_decode(1, []))
        await session.ends(1)
        assert session.failed[1].code == common_pb2.FAILURE_CODE_INTERNAL
        assert "a bug in a kernel" in session.failed[1].message
        assert await node.exit_status() == 1


async def test_a_stranger_gets_in_nowhere() -> None:
    async with process() as node, open_channel(node.address, None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await decode_pb2_grpc.DecodeServiceStub(channel).Describe(common_pb2.DescribeRequest(), timeout=WITHIN_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_what_is_sick_and_what_is_only_busy() -> None:
    class Engine:
        age_s = 0.0

    class Node:
        engine = Engine()
        is_draining = False

    loop = asyncio.new_event_loop()
    node: Any = Node()
    node.crashed = loop.create_future()
    assert health_of(node).is_healthy
    node.engine.age_s = 12.0
    assert health_of(node).is_healthy, "a long step"
    node.engine.age_s = 31.0
    assert not health_of(node).is_healthy
    assert "31 s" in health_of(node).message
    node.engine.age_s = 0.0
    node.crashed.set_result(ValueError())
    assert not health_of(node).is_healthy
    loop.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"listen": "0.0.0.0:0"}, "wants a cluster secret"),
        ({"connector": "pigeon"}, "unknown connector"),
        ({"cluster_secret_file": "/no/such/file"}, "the cluster secret in /no/such/file cannot be read: No such file"),
        (
            {"connector": "no.such:Thing"},
            "connector no.such:Thing cannot be made: ModuleNotFoundError: No module named 'no'",
        ),
        ({"connector": "builtins:open"}, "connector builtins:open cannot be made: TypeError: expected str"),
        ({"device": "cuda:64"}, "there is no device cuda:64 here: torch sees"),
        ({"device": "gpu"}, "device must be cpu, cuda, cuda:1, ..., got 'gpu'"),
        ({"connector": "memory"}, "/no/such/model"),
    ],
)
def test_what_cannot_start_says_why_and_exits_with_1(
    options: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVASIR_CLUSTER_SECRET", raising=False)
    assert exit_status_of(**{"listen": "127.0.0.1:0", "metrics_port": 0, **options}) == 1
    assert words in caplog.text


async def test_a_connector_that_cannot_be_what_it_was_told_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DecodeConfig(model=Path("/m"), listen="127.0.0.1:0", metrics_port=0)
    made, _ = parts(ConnectorSettings(name="shared_storage", path=str(tmp_path), kv_quota_bytes=1))
    async with asyncio.timeout(WITHIN_S):
        assert await NodeProcess(config, KIND, made, SECRET).serve() == 1
    assert "cannot start: a quota of 1 bytes holds no block" in caplog.text


def test_a_taken_port_is_found_before_the_model_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = f"127.0.0.1:{port}"
        for options, option in (({"listen": taken}, "listen"), ({"kv_listen": taken}, "kv-listen")):
            assert exit_status_of(metrics_port=0, **{"listen": "127.0.0.1:0", **options}) == 1
            assert f"cannot start: cannot listen on {taken} (--{option}): Address already in use" in caplog.text
        assert exit_status_of(listen="127.0.0.1:0", metrics_port=port) == 1
        assert "(--metrics-port): Address already in use" in caplog.text
    assert "loading" not in caplog.text


def test_one_port_for_two_options_is_found_before_the_model_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    port = free_port()
    one = f"127.0.0.1:{port}"
    for options, words in (
        ({"metrics_port": port}, f"cannot listen on {one} (--metrics-port): --listen has that port"),
        ({"metrics_port": 0, "kv_listen": one}, f"cannot listen on {one} (--kv-listen): --listen has that port"),
        ({"metrics_port": 0, "kv_listen": f"0.0.0.0:{port}"}, "(--kv-listen): --listen has that port"),
        ({"listen": "127.0.0.1:0", "metrics_port": port, "kv_listen": one}, "(--kv-listen): --metrics-port has"),
        ({"metrics_port": 0, "kv_listen": f"192.0.2.1:{port}"}, "(--kv-listen): Cannot assign requested address"),
    ):
        assert exit_status_of(**{"listen": one, **options}) == 1
        assert words in caplog.text
    assert "loading" not in caplog.text
    assert exit_status_of(listen=one, metrics_port=0, kv_listen=f"127.0.0.2:{port}", connector="memory") == 1
    assert "loading" in caplog.text, "the same port of another address is another port"


def test_an_interface_is_no_address(caplog: pytest.LogCaptureFixture) -> None:
    (name, *_) = (name for _, name in socket.if_nameindex())
    assert exit_status_of(listen="127.0.0.1:0", metrics_port=0, kv_listen=f"{name}:0") == 1
    assert f"cannot listen on {name}:0 (--kv-listen): that is an interface; an address of it is wanted" in caplog.text


def exit_status_of(**options: Any) -> int:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return run_node(DecodeConfig(model="/no/such/model", **options), KIND)  # type: ignore[arg-type]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
