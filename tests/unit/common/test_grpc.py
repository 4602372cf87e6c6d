"""Real servers and channels on loopback: who gets in, how large a message may be, who may have a port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvasir.common.grpc_client import open_channel
from kvasir.common.grpc_options import client_options, server_options
from kvasir.common.grpc_server import bind, new_server
from kvasir.proto import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.ports import held_port

SECRET = "a secret of some length"
WITHIN_S = 60


class Echo(prefill_pb2_grpc.PrefillServiceServicer):
    async def Session(self, commands: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for command in commands:
            yield common_pb2.SessionEvent(number=command.open.last_event)

    def __init__(self, num_chars: int = 100) -> None:
        self._name = "m" * num_chars

    async def Describe(self, request: Any, context: Any) -> Any:
        return common_pb2.DescribeResponse(node=common_pb2.NodeDescription(model_name=self._name))


@asynccontextmanager
async def serving(
    secret: str | None, listen: str = "127.0.0.1:0", *, echo: Echo | None = None, **options: int
) -> AsyncIterator[str]:
    server = new_server(listen, secret, **options)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(echo or Echo(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = bind(server, listen)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def describe(address: str, secret: str | None, **options: int) -> Any:
    async with open_channel(address, secret, **options) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        return await stub.Describe(common_pb2.DescribeRequest(), timeout=WITHIN_S)


async def test_the_right_secret_gets_in_on_unary_calls_and_on_streams() -> None:
    async with serving(SECRET) as address, open_channel(address, SECRET) as channel:
        assert (await describe(address, SECRET)).node.model_name
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        call = stub.Session(metadata=(("other", "metadata"),), timeout=WITHIN_S)
        for number in (7, 8):
            await call.write(prefill_pb2.PrefillCommand(open=common_pb2.OpenSession(last_event=number)))
            assert (await call.read()).number == number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("secret", [None, "another secret of some length", SECRET + "x", SECRET[:-1]])
async def test_anything_else_is_refused_before_the_first_message(secret: str | None) -> None:
    async with serving(SECRET) as address, open_channel(address, secret) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await describe(address, secret)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Session(timeout=WITHIN_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:  # a stream that has sent nothing yet
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_without_a_secret_loopback_is_open_and_a_client_with_one_is_welcome() -> None:
    async with serving(None) as address:
        assert (await describe(address, None)).node.model_name
        assert (await describe(address, SECRET)).node.model_name


async def test_off_loopback_a_secret_is_required() -> None:
    with pytest.raises(ValueError, match="wants a cluster secret"):
        new_server("0.0.0.0:0", None)
    with pytest.raises(ValueError, match="wants a cluster secret"):
        new_server("node-7.example:50051", None)


@pytest.mark.parametrize(("listen", "is_open"), [("127.0.0.1:0", True), ("0.0.0.0:0", False)])
async def test_health_is_open_on_loopback_only(listen: str, is_open: bool) -> None:
    async with serving(SECRET, listen) as address, open_channel(address, None) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        if is_open:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_message_above_the_bound_fails_that_call_alone() -> None:
    async with serving(None, max_message_bytes=50) as address:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await describe(address, None)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with serving(None, max_message_bytes=200) as address:
        assert (await describe(address, None, max_message_bytes=200)).node.model_name


async def test_messages_far_above_grpcs_own_default_pass() -> None:
    prompt = bytes(20 << 20)
    async with serving(None) as address, open_channel(address, None) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Session(timeout=60)
        request = common_pb2.GenerationRequest(prompt_token_ids=prompt)
        await call.write(prefill_pb2.PrefillCommand(start=prefill_pb2.StartPrefill(request=request)))
        assert (await call.read()).number == 0
    async with serving(None, echo=Echo(20 << 20)) as address:  # and back, as logprobs of a long prompt do
        assert len((await describe(address, None)).node.model_name) == 20 << 20


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with serving(None) as address:
        second = new_server(address, None)
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            bind(second, address)
        await second.stop(None)


def test_both_sides_agree() -> None:
    client, server = dict(client_options()), dict(server_options())
    for name in ("grpc.max_send_message_length", "grpc.max_receive_message_length", "grpc.keepalive_timeout_ms"):
        assert client[name] == server[name]
    assert client["grpc.max_send_message_length"] == client["grpc.max_receive_message_length"]
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < client["grpc.keepalive_time_ms"]
    for options in (client, server):
        assert options["grpc.http2.max_pings_without_data"] == 0, "a long silence is one in which pings go on"
    assert client["grpc.max_reconnect_backoff_ms"] <= 2_000


async def test_a_channel_finds_its_server_again() -> None:
    """Back-off is capped at two seconds, so a restarted node is found soon."""
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        async with open_channel(address, None) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await stub.Describe(common_pb2.DescribeRequest(), timeout=WITHIN_S)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            async with serving(None, address), asyncio.timeout(WITHIN_S):
                assert await stub.Describe(common_pb2.DescribeRequest(), wait_for_ready=True)
