"""Sessions over real gRPC on loopback: what is sent, what is sent again, and how each side's silence ends it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from kvasir.common.grpc_client import open_channel
from kvasir.common.grpc_server import bind, new_server
from kvasir.node.kv_feed import KVMirror
from kvasir.node.session import Session, Sessions
from kvasir.node.session_stream import serve_session
from kvasir.proto import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.waiting import until

WITHIN_S = 60


class Host(prefill_pb2_grpc.PrefillServiceServicer):
    """A node that does nothing but remember."""

    epoch = "epoch-1"

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.commands: list[Any] = []
        self.sessions = Sessions(KVMirror(), lambda session: self.ended.append(session.session_id))

    def handle(self, session: Session, command: Any) -> None:
        self.commands.append(command)

    def heartbeat(self, session: Session) -> common_pb2.Heartbeat:
        return common_pb2.Heartbeat(engine_step=7, last_command=session.last_command)

    async def Session(self, commands: AsyncIterator[Any], context: Any) -> None:
        await serve_session(self, commands, context)

    def only_session(self) -> Session:
        (session,) = self.sessions
        return session


class Client:
    """The router's end of one stream."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Session(timeout=60)

    async def open(self, session_id: str, last_event: int = 0) -> Any:
        await self.send(open=common_pb2.OpenSession(session_id=session_id, last_event=last_event))
        return (await self.read()).opened

    async def send(self, **command: Any) -> None:
        await self.call.write(prefill_pb2.PrefillCommand(**command))

    async def acknowledge(self, last_event: int = 0) -> None:
        await self.send(acknowledge=common_pb2.Acknowledge(last_event=last_event))

    async def read(self) -> Any:
        async with asyncio.timeout(WITHIN_S):
            return await self.call.read()

    async def read_numbered(self) -> Any:
        while (event := await self.read()).number == 0:
            pass
        return event


@asynccontextmanager
async def world() -> AsyncIterator[tuple[Host, Callable[[], Client]]]:
    host = Host()
    server = new_server("127.0.0.1:0", None)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(host, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", None)
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    try:
        yield host, lambda: Client(stub)
    finally:
        await channel.close(None)
        await server.stop(None)


async def read_to_the_end(client: Client) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await client.call.read() is not grpc.aio.EOF:
            pass


async def test_events_commands_and_heartbeats_cross() -> None:
    async with world() as (host, connect):
        client = connect()
        opened = await client.open("router-a/1")
        assert (opened.node_epoch, opened.resumed, opened.last_command) == ("epoch-1", False, 0)
        host.only_session().tell(common_pb2.StepOutput(step=3))
        assert (await client.read_numbered()).step.step == 3
        await client.send(number=1, cancel=common_pb2.CancelRequest(handle=5))
        await client.send(number=1, cancel=common_pb2.CancelRequest(handle=5))
        await client.send(number=2, cancel=common_pb2.CancelRequest(handle=6))
        await until(lambda: len(host.commands) == 2)
        assert [command.cancel.handle for command in host.commands] == [5, 6]
        async with asyncio.timeout(WITHIN_S):
            while (event := await client.read()).heartbeat.last_command < 2:  # what was said before may come first
                await client.acknowledge()
        assert (event.heartbeat.engine_step, event.heartbeat.last_command) == (7, 2)


async def test_a_router_that_comes_back_gets_what_it_has_missed() -> None:
    async with world() as (host, connect):
        first = connect()
        await first.open("router-a/1")
        await first.send(number=4, cancel=common_pb2.CancelRequest(handle=1))
        session = host.only_session()
        for step in (1, 2, 3):
            session.tell(common_pb2.StepOutput(step=step))
            assert (await first.read_numbered()).step.step == step
        await first.acknowledge(1)
        first.call.cancel()
        await until(lambda: session.detached_at_s is not None)
        session.tell(common_pb2.StepOutput(step=4))
        session.tell(common_pb2.StepOutput(step=5))
        second = connect()
        opened = await second.open("router-a/1", last_event=2)
        assert (opened.resumed, opened.last_command) == (True, 4)
        events = [await second.read_numbered() for _ in range(2)]
        assert [(event.number, event.step.step) for event in events] == [(3, 3), (4, 5)]
        assert host.ended == []


async def test_a_new_session_of_the_same_router_ends_the_old_one() -> None:
    async with world() as (host, connect):
        first, second = connect(), connect()
        await first.open("router-a/1")
        opened = await second.open("router-a/2")
        assert not opened.resumed
        assert host.ended == ["router-a/1"]
        await read_to_the_end(first)


async def test_a_second_stream_of_a_session_takes_over() -> None:
    async with world() as (host, connect):
        first, second = connect(), connect()
        await first.open("router-a/1")
        assert (await second.open("router-a/1")).resumed
        await read_to_the_end(first)
        host.only_session().tell(common_pb2.StepOutput(step=9))
        assert (await second.read_numbered()).step.step == 9
        assert host.only_session().detached_at_s is None


async def test_a_silent_router_is_lost_and_a_talking_one_is_not() -> None:
    async with world() as (host, connect):
        silent, talking = connect(), connect()
        await silent.open("silent/1")
        await talking.open("talking/1")

        async def talk() -> None:
            while True:
                await talking.acknowledge()
                await asyncio.sleep(0.1)

        talk_task = asyncio.create_task(talk())
        try:
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await read_to_the_end(silent)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            detached = {session.session_id: session.detached_at_s is not None for session in host.sessions}
            assert detached == {"silent/1": True, "talking/1": False}
        finally:
            talk_task.cancel()


async def test_a_router_that_reads_nothing_blocks_nobody_and_is_lost() -> None:
    """Its window fills up, the rest merges, and since it says nothing either, its stream ends."""
    async with world() as (host, connect):
        stuck = connect()
        await stuck.open("stuck/1")
        session = host.only_session()
        for handle in range(60):
            tokens = common_pb2.SequenceOutput(handle=handle, token_ids=bytes(1 << 20))
            session.tell(common_pb2.StepOutput(outputs=[tokens]))
            await asyncio.sleep(0.001)
        assert session.log.num_kept < 40, "the later steps have merged"
        await until(lambda: session.detached_at_s is not None)


@pytest.mark.parametrize(
    "command", [{"cancel": common_pb2.CancelRequest(handle=1)}, {"open": common_pb2.OpenSession()}]
)
async def test_a_stream_must_begin_with_open(command: dict[str, Any]) -> None:
    async with world() as (host, connect):
        client = connect()
        await client.send(**command)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(host.sessions) == 0


async def test_a_snapshot_comes_as_soon_as_it_is_asked_for() -> None:
    async with world() as (host, connect):
        client = connect()
        await client.open("router-a/1")
        session = host.only_session()
        session.tell_all_cached()
        assert (await client.read_numbered()).kv_events.snapshot
