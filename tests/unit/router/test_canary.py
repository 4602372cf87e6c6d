"""Readiness: a real generation has been through all tiers, and a decode node is alive."""

from kvasir.proto import common_pb2
from tests.fake_cluster import FakeCluster, fake_cluster
from tests.waiting import until

FAST_LOSS = {"heartbeat_timeout_s": 0.6}


def canaries(cluster: FakeCluster, result: str) -> float:
    return cluster.metric("kvasir:canaries_total", result=result)


async def test_the_canary_goes_through_both_tiers() -> None:
    async with fake_cluster(minds_canaries=True) as cluster:
        assert cluster.dispatcher.is_ready
        assert [one.num_started >= 1 for one in cluster.nodes] == [True, True]
        last = cluster.decode[0].started[-1]
        assert last.transfer_id == cluster.prefill[0].started[-1].transfer_id
        assert last.request.sampling.temperature == 0
        assert len(last.outputs[0]) == 2


async def test_asking_whether_it_is_ready_generates_nothing() -> None:
    async with fake_cluster(minds_canaries=True) as cluster:
        before = [node.num_started for node in cluster.nodes]
        assert all(cluster.dispatcher.is_ready for _ in range(100))
        assert [node.num_started for node in cluster.nodes] == before


async def test_it_runs_again_when_the_nodes_change_and_until_it_succeeds() -> None:
    async with fake_cluster(0, 1, FAST_LOSS, minds_canaries=True) as cluster:
        passed = canaries(cluster, "ok")
        decode = cluster.decode[0]
        await decode.die()
        await until(lambda: not cluster.dispatcher.is_ready)
        decode.behaviour.fail_starts = [common_pb2.FAILURE_CODE_NUMERICAL]
        await decode.start(decode.address)
        await until(lambda: canaries(cluster, "failed") == 1)
        assert not cluster.dispatcher.is_ready
        await until(lambda: cluster.dispatcher.is_ready)
        assert canaries(cluster, "ok") == passed + 1


async def test_a_draining_decode_node_is_not_ready() -> None:
    async with fake_cluster(minds_canaries=True) as cluster:
        cluster.decode[0].behaviour.is_draining = True
        await until(lambda: not cluster.dispatcher.is_ready)
