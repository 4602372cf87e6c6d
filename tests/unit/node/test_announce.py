"""Nodes and the registry, over real gRPC: routers that are there, come late, refuse, and are left."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvasir.cli.ports import free_port
from kvasir.common.grpc_server import bind, new_server
from kvasir.node import announce
from kvasir.node.announce import Announcer, own_address
from kvasir.proto import common_pb2, registry_pb2, registry_pb2_grpc
from tests.waiting import until

NODE = common_pb2.NodeDescription(node_epoch="epoch-1", model_name="m")
SECRET = "a secret of some length"
WITHIN_S = 60


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.announced: list[registry_pb2.AnnounceRequest] = []
        self.withdrawn: list[registry_pb2.WithdrawRequest] = []
        self.refused_because = ""

    async def Announce(self, request: Any, context: Any) -> Any:
        self.announced.append(request)
        return registry_pb2.AnnounceResponse(refused_because=self.refused_because, announce_again_s=0.01)

    async def Withdraw(self, request: Any, context: Any) -> Any:
        self.withdrawn.append(request)
        return registry_pb2.WithdrawResponse()


@asynccontextmanager
async def router(registry: Registry, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = new_server(listen, SECRET)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)
    port = bind(server, listen)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_node_announces_itself_again_and_again_and_withdraws_when_it_leaves() -> None:
    first, second = Registry(), Registry()
    async with router(first) as one, router(second) as two:
        announcer = Announcer([one, two], "10.0.0.1:5", NODE, SECRET)
        await announcer.start()
        await until(lambda: len(first.announced) >= 2 and len(second.announced) >= 2)
        await announcer.close()
        assert first.announced[0].address == "10.0.0.1:5"
        assert first.announced[0].node.model_name == "m"
        for registry in (first, second):
            assert [(one.address, one.node_epoch) for one in registry.withdrawn] == [("10.0.0.1:5", "epoch-1")]


async def test_a_router_that_comes_late_is_found_and_its_absence_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address, registry = f"127.0.0.1:{free_port()}", Registry()
    announcer = Announcer([address], "10.0.0.1:5", NODE, SECRET)
    with caplog.at_level(logging.INFO, logger=announce.__name__):
        await announcer.start()
        await until(lambda: "UNAVAILABLE" in caplog.text)
        await asyncio.sleep(0.7)  # two tries more
        async with router(registry, address):
            await until(lambda: registry.announced)
            await until(lambda: "takes this node" in caplog.text)
            await announcer.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "UNAVAILABLE" in warnings[0]
    assert len(warnings) == len(set(warnings)), "nothing is said twice"


async def test_a_refusal_is_said_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.refused_because = "another model"
    async with router(registry) as address:
        announcer = Announcer([address], "10.0.0.1:5", NODE, SECRET)
        await announcer.start()
        await until(lambda: len(registry.announced) >= 2)
        await announcer.close()
    assert [record.getMessage() for record in caplog.records if "another model" in record.getMessage()] == [
        f"router {address} does not take this node: another model"
    ]


async def test_leaving_does_not_wait_for_a_router_that_is_gone() -> None:
    async with router(Registry()) as address:
        announcer = Announcer([address], "10.0.0.1:5", NODE, SECRET)
        await announcer.start()
    async with asyncio.timeout(WITHIN_S):
        await announcer.close()


def test_where_others_reach_a_node() -> None:
    assert own_address("127.0.0.1", []) == "127.0.0.1"
    assert own_address("node-7", ["a:1"]) == "node-7"
    assert own_address("0.0.0.0", ["127.0.0.1:8001"]) == "127.0.0.1"
    assert own_address("0.0.0.0", []) == socket.gethostname()
    assert own_address("0.0.0.0", ["no-such-host.invalid:1"]) == socket.gethostname()
