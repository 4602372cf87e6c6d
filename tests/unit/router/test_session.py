"""The router's end of a session against a node over real gRPC, through connections that break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvasir.common.errors import NodeUnavailable
from kvasir.proto import common_pb2
from kvasir.router import wire
from kvasir.router.node_events import Admitted, Event, Failed, Tokens
from kvasir.router.nodes import NodeLoad, Role
from kvasir.router.pace import Pace
from kvasir.router.session import NodeSession, SessionSettings
from tests.fake_cluster import a_request, collect, fake_cluster, tokens_of
from tests.fake_engine import Fabric
from tests.fake_node import FakeNode
from tests.fake_request import expected_tokens
from tests.tcp_proxy import TcpProxy
from tests.waiting import until

SETTINGS = SessionSettings(heartbeat_timeout_s=0.8, engine_age_limit_s=5.0, open_timeout_s=60.0)


@asynccontextmanager
async def session_with(node: FakeNode, address: str = "", **settings: Any) -> AsyncIterator[NodeSession]:
    info = wire.node_from_proto(address or node.address, node.description())
    session = NodeSession(info, None, replace(SETTINGS, **settings))
    try:
        yield session
    finally:
        await session.close()


def begin(session: NodeSession, num_prompt_tokens: int = 20, max_tokens: int = 50) -> list[Event]:
    """A request that the decode node prefills itself; what it says of it gathers in the list."""
    events: list[Event] = []
    handle = session.begin(events.append)
    request = wire.request_to_proto(a_request(num_prompt_tokens, max_tokens), (), None)
    session.send(wire.start_decode(handle, request, None))
    session.send(wire.continue_decode(handle, ((),)))
    return events


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


async def loss_of(session: NodeSession) -> str:
    async with asyncio.timeout(60):
        return await session.lost()


async def test_a_cut_connection_loses_and_doubles_nothing() -> None:
    async with (
        FakeNode("decode", Fabric(), token_s=0.005) as node,
        TcpProxy(node.address) as proxy,
        session_with(node, proxy.address, heartbeat_timeout_s=60) as session,
    ):
        await session.open()
        requests = []
        for cut in range(6):
            requests.append(begin(session, 10 + cut))
            await until(lambda: len(tokens(requests[-1])) >= 3)
            requests.append(begin(session, 40 + cut))  # its commands are on their way when the line is cut
            proxy.cut()
        await until(lambda: all(len(tokens(events)) == 50 for events in requests))
        prompts = [length + cut for cut in range(6) for length in (10, 40)]
        for length, events in zip(prompts, requests, strict=True):
            assert tokens(events) == expected_tokens(a_request(length).prompt_token_ids, 50, seed=7)
        assert node.num_resumed >= 3
        assert node.num_started == 12
        assert not session.is_lost


async def test_whole_requests_survive_cut_connections() -> None:
    settings = {"heartbeat_timeout_s": 60}  # however slowly they connect again: that is no loss
    async with fake_cluster(num_prefill=0, num_decode=0, config=settings) as cluster:
        fabric = Fabric()
        async with (
            FakeNode("prefill", fabric, chunk_s=0.01) as prefill,
            FakeNode("decode", fabric, token_s=0.005) as decode,
            TcpProxy(prefill.address) as to_prefill,
            TcpProxy(decode.address) as to_decode,
        ):
            registry = f"127.0.0.1:{cluster.cluster.registry_port}"
            prefill.address, decode.address = to_prefill.address, to_decode.address
            await prefill.announce(registry)
            await decode.announce(registry)
            await until(lambda: cluster.dispatcher.is_ready)
            requests = [a_request(100 + index, 60, seed=index) for index in range(8)]
            answers = [asyncio.create_task(collect(cluster.dispatcher.generate(request))) for request in requests]
            while not all(answer.done() for answer in answers):
                await asyncio.sleep(0.1)
                num_resumed = prefill.num_resumed, decode.num_resumed
                to_prefill.cut()
                to_decode.cut()
                await until(lambda: prefill.num_resumed > num_resumed[0] and decode.num_resumed > num_resumed[1])  # noqa: B023
            for request, answer in zip(requests, answers, strict=True):
                expected = expected_tokens(request.prompt_token_ids, 60, request.sampling.seed)
                assert tokens_of(answer.result()) == expected
            assert prefill.num_resumed >= 1
            assert decode.num_resumed >= 1
            assert cluster.metric("kvasir:nodes_lost_total", role="decode") == 0


async def test_silence_is_a_loss_and_each_request_is_told() -> None:
    async with FakeNode("decode", Fabric(), token_s=0.01) as node, session_with(node) as session:
        await session.open()
        first, second = begin(session), begin(session)
        await until(lambda: bool(tokens(first) and tokens(second)))
        node.is_frozen = True
        assert "silent for" in await loss_of(session)
        for events in (first, second, begin(session)):
            failure = events[-1]
            assert isinstance(failure, Failed)
            assert isinstance(failure.error, NodeUnavailable)
        node.is_frozen = False


async def test_a_stuck_engine_is_a_loss_though_its_node_speaks() -> None:
    async with FakeNode("decode", Fabric()) as node, session_with(node) as session:
        await session.open()
        node.behaviour.engine_age_s = 6.0
        assert "has not finished a step for 6.0 s" in await loss_of(session)


async def test_a_long_step_is_no_loss() -> None:
    loads: list[NodeLoad] = []
    async with (
        FakeNode("decode", Fabric(), engine_age_s=4.9, heartbeat_s=0.01) as node,
        session_with(node, heartbeat_timeout_s=60) as session,
    ):
        session.on_heartbeat = lambda load, draining: loads.append(load)
        load = await session.open()
        assert load.num_free_blocks == node.behaviour.num_blocks
        await until(lambda: len(loads) > 10)
        assert not session.is_lost


async def test_a_restarted_node_is_another_one() -> None:
    async with FakeNode("decode", Fabric()) as node, session_with(node) as session:
        await session.open()
        await node.restart()
        assert "has restarted" in await loss_of(session)


async def test_a_forgotten_session_is_a_loss() -> None:
    async with (
        FakeNode("decode", Fabric()) as node,
        TcpProxy(node.address) as proxy,
        session_with(node, proxy.address) as session,
    ):
        await session.open()
        node.sessions.clear()
        proxy.cut()
        assert "no longer knows the session" in await loss_of(session)


async def test_nobody_there() -> None:
    node = FakeNode("decode", Fabric())
    async with session_with(node, "127.0.0.1:1", open_timeout_s=0.5) as session:
        with pytest.raises(NodeUnavailable):
            await session.open()


async def test_delivered_events_are_acknowledged_and_arrived_commands_forgotten() -> None:
    async with FakeNode("decode", Fabric()) as node, session_with(node) as session:
        await session.open()
        events = begin(session)
        await until(lambda: len(tokens(events)) == 50)
        (at_node,) = node.sessions.values()
        await until(lambda: at_node.num_acknowledged == len(at_node.events))
        await until(lambda: session.all_confirmed)
        assert at_node.last_command == 2


async def test_roles_have_sessions_of_their_own_kind() -> None:
    async with FakeNode("prefill", Fabric()) as node, session_with(node) as session:
        await session.open()
        assert session.info.role is Role.PREFILL


async def test_steps_that_wait_for_each_other_are_one_event_and_lose_nothing() -> None:
    pace = Pace(longest_s=1)
    async with FakeNode("decode", Fabric(), token_s=0.001) as node, session_with(node, pace=pace) as session:
        await session.open()
        alone = begin(session)
        await until(lambda: len(tokens(alone)) == 50)
        pace.gap_s = 0.5  # in which many steps come, however slow this machine is
        together = [begin(session, 20 + index) for index in range(3)]
        await until(lambda: all(len(tokens(events)) == 50 for events in together))
        for index, events in enumerate(together):
            assert tokens(events) == expected_tokens(a_request(20 + index).prompt_token_ids, 50, seed=7)
            assert isinstance(events[0], Admitted)
            assert isinstance(events[-1], Tokens)
            assert events[-1].finish_reason == "length"
        assert max(map(len, together)) < len(alone) / 2


async def test_what_has_come_is_told_before_the_loss() -> None:
    pace = Pace(longest_s=1)
    async with (
        FakeNode("decode", Fabric(), most_tokens=20) as node,
        session_with(node, pace=pace, heartbeat_timeout_s=5) as session,  # not before the test wants it
    ):
        await session.open()
        events = begin(session)
        await until(lambda: len(tokens(events)) == 20)
        pace.gap_s = 60
        node.behaviour.most_tokens = None
        await until(lambda: not node.requests)
        session_on_node = next(iter(node.sessions.values()))
        await until(lambda: session_on_node.num_acknowledged == len(session_on_node.events))
        assert len(tokens(events)) == 20
        await node.die()
        await loss_of(session)
        assert len(tokens(events)) == 50
        assert isinstance(events[-1], Failed)


@pytest.mark.parametrize("gap_s", [0.0, 0.3, 60.0])
async def test_what_cannot_be_read_is_a_loss_whenever_it_is_delivered(gap_s: float) -> None:
    """At once; by the timer; or before the loss that something else is, here silence."""
    pace = Pace(longest_s=100)
    async with FakeNode("decode", Fabric()) as node, session_with(node, pace=pace) as session:
        await session.open()
        events: list[Event] = []
        handle = session.begin(events.append)
        on_node = next(iter(node.sessions.values()))
        on_node.tell(step=common_pb2.StepOutput(admitted=[common_pb2.RequestAdmitted(handle=handle)]))
        await until(lambda: len(events) == 1)
        pace.gap_s = gap_s
        half_a_token = common_pb2.SequenceOutput(handle=handle, token_ids=b"12")
        on_node.tell(step=common_pb2.StepOutput(outputs=[half_a_token]))
        if gap_s == 60:
            await until(lambda: on_node.num_acknowledged == 2)
            node.is_frozen = True
        assert "cannot read what it says" in await loss_of(session)
        assert [type(event) for event in events] == [Admitted, Failed]
