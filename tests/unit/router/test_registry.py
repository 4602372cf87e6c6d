"""How nodes join and leave."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import pytest

from kvasir.common.grpc_client import open_channel
from kvasir.common.metrics import Metrics
from kvasir.proto import common_pb2, registry_pb2, registry_pb2_grpc
from kvasir.router.cluster import running_cluster
from kvasir.router.config import RouterConfig
from kvasir.router.nodes import Role
from kvasir.router.registry import places_of
from tests.fake_cluster import FakeCluster, a_request, collect, fake_cluster, tokens_of
from tests.fake_engine import Fabric
from tests.fake_node import FakeNode
from tests.fake_request import expected_tokens
from tests.waiting import until

FAST_LOSS = {"heartbeat_timeout_s": 0.6}


def registry_of(cluster: FakeCluster) -> str:
    return f"127.0.0.1:{cluster.cluster.registry_port}"


def members(cluster: FakeCluster) -> set[str]:
    return {node.info.address for node in cluster.cluster.pool.nodes()}


async def test_announced_nodes_serve_until_they_are_lost_and_after_they_announce_again() -> None:
    fabric = Fabric()
    async with fake_cluster(0, 0, FAST_LOSS) as cluster, FakeNode("decode", fabric) as decode:
        assert not cluster.dispatcher.is_ready
        answer = await decode.announce(registry_of(cluster))
        assert answer.refused_because == ""
        assert 0 < answer.announce_again_s < 10
        await until(lambda: cluster.dispatcher.is_ready)
        async with FakeNode("prefill", fabric) as prefill:
            await prefill.announce(registry_of(cluster))
            await until(lambda: prefill.address in members(cluster))
            request = a_request()
            assert tokens_of(await collect(cluster.dispatcher.generate(request))) == expected_tokens(
                request.prompt_token_ids, 12, seed=7
            )
            assert prefill.num_started >= 1
        await until(lambda: prefill.address not in members(cluster))
        await decode.die()
        await until(lambda: not members(cluster))
        assert not cluster.dispatcher.is_ready
        await decode.start(decode.address)
        await asyncio.sleep(0.3)
        assert not members(cluster)  # nobody dials what has not announced itself
        await decode.announce(registry_of(cluster))
        await until(lambda: cluster.dispatcher.is_ready)


async def test_announcing_again_changes_nothing() -> None:
    async with fake_cluster(0, 0) as cluster, FakeNode("decode", Fabric()) as decode:
        for _ in range(5):
            assert (await decode.announce(registry_of(cluster))).refused_because == ""
        await until(lambda: cluster.dispatcher.is_ready)
        for _ in range(5):
            await decode.announce(registry_of(cluster))
        assert len(decode.sessions) == 1
        assert cluster.metric("kvasir:nodes_joined_total", role="decode") == 1


async def test_a_restarted_node_that_announces_itself_replaces_its_older_self_at_once() -> None:
    async with fake_cluster(0, 0, {"heartbeat_timeout_s": 60}) as cluster, FakeNode("decode", Fabric()) as decode:
        await decode.announce(registry_of(cluster))
        await until(lambda: cluster.dispatcher.is_ready)
        await decode.restart()
        await decode.announce(registry_of(cluster))
        await until(lambda: [one.info.epoch for one in cluster.cluster.pool.nodes()] == [decode.epoch])
        assert len(tokens_of(await collect(cluster.dispatcher.generate(a_request())))) == 12


async def test_two_nodes_of_one_address_do_not_take_each_others_place_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each announcement ended the other's session, with all that ran there; and no line told of it."""
    fabric = Fabric()
    async with fake_cluster(0, 0) as cluster, FakeNode("decode", fabric) as one, FakeNode("decode", fabric) as other:
        other.address = one.address
        await one.announce(registry_of(cluster))
        await until(lambda: cluster.dispatcher.is_ready)
        assert (await other.announce(registry_of(cluster))).refused_because == "", "it may be the same, restarted"
        await until(lambda: cluster.metric("kvasir:nodes_joined_total", role="decode") == 2)
        for _ in range(3):
            refusal = (await one.announce(registry_of(cluster))).refused_because
            assert one.address in refusal
            assert "--advertise-host" in refusal
            assert (await other.announce(registry_of(cluster))).refused_because == ""
        await until(lambda: cluster.dispatcher.is_ready)
        assert cluster.metric("kvasir:nodes_joined_total", role="decode") == 2
        assert len(tokens_of(await collect(cluster.dispatcher.generate(a_request())))) == 12
    assert "two nodes take each other's place" in caplog.text


async def test_static_nodes_are_dialled_until_they_are_there_and_again_when_lost() -> None:
    async with fake_cluster(1, 1, FAST_LOSS) as cluster:
        decode = cluster.decode[0]
        await decode.die()
        await until(lambda: decode.address not in members(cluster))
        await decode.start(decode.address)
        await until(lambda: decode.address in members(cluster))


@pytest.mark.parametrize(
    ("behaviour", "both"),
    [
        ({"model": b"model-b"}, (b"model-a".hex(), b"model-b".hex())),
        ({"block_size": 32}, ("block size 32", "has 16")),
    ],
)
async def test_a_node_that_cannot_pair_is_refused_with_both_values(
    behaviour: dict[str, object], both: tuple[str, str]
) -> None:
    fabric = Fabric()
    async with fake_cluster(0, 1) as cluster, FakeNode("prefill", fabric, **behaviour) as stranger:
        answer = await stranger.announce(registry_of(cluster))
        assert all(value in answer.refused_because for value in both)
        cluster.decode[0].fabric = fabric
        assert members(cluster) == {cluster.decode[0].address}


async def test_of_two_that_cannot_pair_the_static_list_keeps_one() -> None:
    async with FakeNode("decode", Fabric()) as one, FakeNode("decode", Fabric(), model=b"model-b") as other:
        config = RouterConfig(grpc_listen="127.0.0.1:0", decode=[one.address, other.address])
        async with running_cluster(config, None, Metrics()) as cluster:
            await until(lambda: cluster.dispatcher.is_ready)
            await asyncio.sleep(0.5)
            assert len(cluster.pool.nodes()) == 1


async def test_a_node_in_the_wrong_list_does_not_join() -> None:
    async with FakeNode("decode", Fabric()) as decode:
        config = RouterConfig(grpc_listen="127.0.0.1:0", prefill=[decode.address])
        async with running_cluster(config, None, Metrics()) as cluster:
            await asyncio.sleep(0.5)
            assert not cluster.pool.nodes()


async def test_a_node_that_describes_itself_in_no_readable_way_is_dialled_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeNode("decode", Fabric()) as decode:
        readable = decode.description()
        odd = common_pb2.NodeDescription(role=common_pb2.ROLE_DECODE, eos_token_ids=b"odd")
        decode.description = lambda: odd  # type: ignore[method-assign]
        config = RouterConfig(grpc_listen="127.0.0.1:0", decode=[decode.address])
        async with running_cluster(config, None, Metrics()) as cluster:
            await until(lambda: "cannot read what" in caplog.text)
            decode.description = lambda: readable  # type: ignore[method-assign]
            await until(lambda: bool(cluster.pool.nodes()))


async def test_a_name_of_several_nodes_is_one_of_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that it is looked up it begins with another, as names with several addresses do: a node described
    itself, another one was connected, and taken for the first one restarted."""
    fabric, turns, look_up = Fabric(), [0], socket.getaddrinfo

    def in_turn(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "nodes.test":
            return look_up(host, port, *args, **options)
        turns[0] += 1
        hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        hosts = hosts[turns[0] % 3 :] + hosts[: turns[0] % 3]
        return [end for one in hosts for end in look_up(one, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", in_turn)
    async with FakeNode("decode", fabric) as one, FakeNode("decode", fabric) as other:
        port = one.address.rpartition(":")[2]
        await other.die()
        await other.start(f"127.0.0.2:{port}")  # at the third, nobody is
        config = RouterConfig(grpc_listen="127.0.0.1:0", decode=[f"nodes.test:{port}"])
        async with running_cluster(config, None, Metrics()) as cluster:
            for _ in range(3):
                await until(lambda: cluster.dispatcher.is_ready)
                (node,) = cluster.pool.nodes()
                assert node.info.address == f"nodes.test:{port}"
                used = one if node.info.epoch == one.epoch else other
                assert used.sessions
                await asyncio.sleep(0.8)
                assert cluster.pool.nodes() == [node]
                used.behaviour.engine_age_s = 100  # so it is lost, and dialled again
                await until(lambda: node not in cluster.pool.nodes())  # noqa: B023
                used.behaviour.engine_age_s = 0
                await until(lambda: bool(cluster.pool.nodes()))
    assert "stands for several nodes" in caplog.text
    assert "restarted" not in caplog.text


async def test_a_name_that_nobody_knows_is_looked_up_again(caplog: pytest.LogCaptureFixture) -> None:
    config = RouterConfig(grpc_listen="127.0.0.1:0", decode=["nobody.invalid:1"])
    async with running_cluster(config, None, Metrics()):
        await until(lambda: "nobody.invalid:1 cannot be looked up" in caplog.text)


async def test_what_somebody_answers_is_told_sooner_than_that_nobody_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`localhost` is often ::1 too, where no node listens: that was told, and not that the secret is wrong."""
    look_up = socket.getaddrinfo

    def two_places(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        hosts = ["127.0.0.3", "127.0.0.1"] if host == "node.test" else [host]
        return [end for one in hosts for end in look_up(one, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", two_places)
    async with fake_cluster(0, 0) as other:  # it answers, and is no node
        address = f"node.test:{other.cluster.registry_port}"
        config = RouterConfig(grpc_listen="127.0.0.1:0", decode=[address])
        async with running_cluster(config, None, Metrics()):
            await until(lambda: f"cannot use decode node {address}" in caplog.text)
    assert f"cannot use decode node {address}: UNIMPLEMENTED" in caplog.text


def test_an_address_of_a_link_keeps_the_name_of_the_link() -> None:
    """Without it, nobody knows which of the links is meant."""
    link = socket.if_nameindex()[0][1]
    assert places_of(f"[fe80::1%{link}]:50051") == [f"[fe80::1%{link}]:50051"]


async def test_a_name_server_that_does_not_answer_keeps_nothing_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names were looked up where large bodies and long answers are read and written: all of these waited."""
    look_up, answers = socket.getaddrinfo, threading.Event()

    def slowly(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".slow"):
            answers.wait(120)
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    async with FakeNode("decode", Fabric()) as node:
        config = RouterConfig(grpc_listen="127.0.0.1:0", decode=[*(f"{one}.slow:1" for one in range(8)), node.address])
        async with running_cluster(config, None, Metrics()) as cluster:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
            try:
                async with asyncio.timeout(60):
                    await until(lambda: cluster.dispatcher.is_ready)
                    await asyncio.to_thread(lambda: None)
            finally:
                answers.set()


async def test_an_announcer_that_cannot_be_dialled_is_told() -> None:
    async with fake_cluster(0, 0) as cluster:
        node = FakeNode("decode", Fabric())
        node.address = "127.0.0.1:1"
        await node.announce(registry_of(cluster))
        trouble = ""
        async with asyncio.timeout(60):
            while not trouble:
                await asyncio.sleep(0.05)
                trouble = (await node.announce(registry_of(cluster))).refused_because
        assert "UNAVAILABLE" in trouble


async def test_withdrawn_nodes_get_nothing_new() -> None:
    async with fake_cluster(0, 2) as cluster:
        leaving = cluster.decode[0]
        async with open_channel(registry_of(cluster), None) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            await stub.Withdraw(registry_pb2.WithdrawRequest(address=leaving.address, node_epoch="of another life"))
            assert not cluster.cluster.pool[leaving.address].is_draining
            await stub.Withdraw(registry_pb2.WithdrawRequest(address=leaving.address, node_epoch=leaving.epoch))
        num_started = leaving.num_started
        for _ in range(4):
            await collect(cluster.dispatcher.generate(a_request()))
        assert leaving.num_started == num_started
        assert cluster.dispatcher.is_ready


async def test_the_registry_wants_the_cluster_secret() -> None:
    config = RouterConfig(grpc_listen="127.0.0.1:0")
    node = FakeNode("decode", Fabric())
    async with running_cluster(config, "a-secret-of-the-cluster", Metrics()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await node.announce(f"127.0.0.1:{cluster.registry_port}")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(ValueError, match="wants a cluster secret"):
        async with running_cluster(RouterConfig(grpc_listen="0.0.0.0:0"), None, Metrics()):
            pass


async def test_stopping_leaves_no_task() -> None:
    tasks_before = asyncio.all_tasks()
    async with fake_cluster(1, 1) as cluster:
        answer = asyncio.create_task(collect(cluster.dispatcher.generate(a_request())))
        await answer
    await until(lambda: asyncio.all_tasks() <= tasks_before)
    assert not cluster.cluster.pool.nodes(Role.DECODE)


async def test_an_announcement_that_makes_no_sense_is_refused_by_its_status() -> None:
    async with fake_cluster(0, 0) as cluster, open_channel(registry_of(cluster), None) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)  # type: ignore[no-untyped-call]
        node = common_pb2.NodeDescription(eos_token_ids=b"odd")
        with pytest.raises(grpc.aio.AioRpcError, match="4 bytes each") as refused:
            await stub.Announce(registry_pb2.AnnounceRequest(address="127.0.0.1:1", node=node), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not members(cluster)
