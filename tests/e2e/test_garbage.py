"""Garbage at every port of every process: nothing dies, hangs or grows, and the next request is answered as ever."""

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress

import grpc
import pytest

from kvasir.common.grpc_client import open_channel
from kvasir.proto import decode_pb2, prefill_pb2, registry_pb2
from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.test_faults import expected, stream
from tests.garbage import garbage, ports_of, random_message, rss_bytes, spoilt, throw_many
from tests.service import Service
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MAY_GROW_BYTES = 64 << 20
NUM_INPUTS = [1_500, pytest.param(100_000, marks=pytest.mark.full)]  # the latter by `make test-fuzz`
NUM_CALLS = [300, pytest.param(20_000, marks=pytest.mark.full)]
RAISED = re.compile(r"^Traceback .*\n(?:[ ~^].*\n|\n)*([\w.]+)", re.MULTILINE)  # what the logs' tracebacks end with
EFFECTIVE = {"Drain"}  # what it does, it does to whoever knows the secret


@pytest.fixture
def unharmed(cluster: Cluster) -> Iterator[None]:
    """What must hold afterwards. The first answer comes before anything is measured, for what it warms."""
    prompt = next(prompt for prompt in reference.prompts(cluster.model_dir) if prompt.name == "100-tokens")
    assert stream(cluster, prompt) == expected(prompt)
    rss = {service: rss_bytes(service.process.pid) for service in cluster.services}
    sockets = {service: service.num_open_sockets for service in cluster.services}
    yield
    assert [service.name for service in cluster.services if service.process.poll() is not None] == []
    cluster.wait_ready()
    assert stream(cluster, prompt) == expected(prompt)
    for service in cluster.services:
        wait_until(_has_let_go(service, sockets[service] + 8), 60, f"{service.name} closes what strangers opened")
        assert rss_bytes(service.process.pid) - rss[service] < MAY_GROW_BYTES, service.name
        assert set(RAISED.findall(service.log())) <= {"google.protobuf.message.DecodeError"}, service.name


def _has_let_go(service: Service, num_sockets: int) -> Callable[[], bool]:
    return lambda: service.num_open_sockets <= num_sockets


@pytest.mark.parametrize("num_inputs", NUM_INPUTS)
def test_bytes_of_strangers(cluster: Cluster, unharmed: None, num_inputs: int) -> None:
    rng = random.Random(num_inputs)
    ports = sorted(port for service in cluster.services for port in ports_of(service.process.pid))
    assert len(ports) >= 7, "HTTP, registry; for each node gRPC, metrics and KV"
    asyncio.run(throw_many(ports, num_inputs, rng))


METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (prefill_pb2, decode_pb2, registry_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in EFFECTIVE
}


@pytest.mark.parametrize("num_calls", NUM_CALLS)
def test_calls_of_who_knows_the_secret(cluster: Cluster, unharmed: None, num_calls: int) -> None:
    """Messages of the right kind with anything in them, damaged ones, and noise."""
    rng = random.Random(num_calls)
    ports = sorted(port for service in cluster.services for port in ports_of(service.process.pid))
    asyncio.run(_call_all(ports, cluster.environment["KVASIR_CLUSTER_SECRET"], num_calls, rng))


NUM_SERVERS = 3  # of gRPC: the router, and both nodes


async def _those_that_speak_grpc(channels: list[grpc.aio.Channel]) -> list[grpc.aio.Channel]:
    """The others never become ready."""
    waiting = {asyncio.create_task(channel.channel_ready()): channel for channel in channels}
    await until(lambda: sum(task.done() for task in waiting) == NUM_SERVERS)
    speaking = [channel for task, channel in waiting.items() if task.done()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return speaking


async def _call_all(ports: list[int], secret: str, num_calls: int, rng: random.Random) -> None:
    async with AsyncExitStack() as stack:
        channels = [open_channel(f"127.0.0.1:{port}", secret) for port in ports]
        for channel in channels:
            stack.push_async_callback(channel.close, None)
        speaking = await _those_that_speak_grpc(channels)
        targets = [(channel, path) for channel in speaking for path in METHODS]
        left = iter(range(num_calls))

        async def caller() -> None:
            for _ in left:
                await _call(*rng.choice(targets), rng)

        async with asyncio.TaskGroup() as group:
            for _ in range(32):
                group.create_task(caller())


async def _call(channel: grpc.aio.Channel, path: str, rng: random.Random) -> None:
    method = METHODS[path]
    messages = [_message(path, rng) for _ in range(rng.randint(1, 5) if method.client_streaming else 1)]
    with suppress(grpc.RpcError, TimeoutError):
        async with asyncio.timeout(0.2):
            if method.client_streaming:
                async for _ in channel.stream_stream(path, bytes, bytes)(iter(messages)):
                    pass
            else:
                await channel.unary_unary(path, bytes, bytes)(messages[0])


def _message(path: str, rng: random.Random) -> bytes:
    match rng.randrange(3):
        case 0:
            return garbage(rng)
        case 1:
            return random_message(METHODS[path].input_type, rng).SerializeToString()
        case _:
            return spoilt(random_message(METHODS[path].input_type, rng).SerializeToString(), rng)
