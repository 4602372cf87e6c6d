"""What nodes tell of their caches decides where requests go, over real sessions with fake nodes."""

import gc
from contextlib import aclosing
from typing import Any

import pytest

from kvasir.common.hashing import block_hashes, root_hash, routing_key
from kvasir.proto import common_pb2
from kvasir.router.nodes import Role
from kvasir.router.prefix_index import Prefix
from kvasir.router.types import RoutedRequest
from tests.fake_cluster import FakeCluster, a_request, collect, fake_cluster, tokens_of
from tests.fake_node import FakeNode
from tests.fake_request import BLOCK_SIZE, expected_tokens
from tests.waiting import until

NUM_TOKENS = 200


def keys_of(request: RoutedRequest, model: bytes = b"model-a") -> list[int]:
    hashes = block_hashes(root_hash(model, request.cache_salt), request.prompt_token_ids, BLOCK_SIZE)
    return [routing_key(one) for one in hashes]


def tell(node: FakeNode, sequence: int, stored: list[int], **fields: Any) -> None:
    (session,) = node.sessions.values()
    session.tell(kv_events=common_pb2.KVEvents(first_sequence=sequence, stored_keys=stored, **fields))


async def until_known(cluster: FakeCluster, node: FakeNode, num_blocks: int) -> None:
    await until(lambda: len(cluster.cluster.pool[node.address].held) == num_blocks)


async def generate(cluster: FakeCluster, request: RoutedRequest) -> list[str]:
    """Which nodes the tokens came from, which are checked. Nothing is left of earlier ones."""
    await until(lambda: all(node.view().pressure == 0 for node in cluster.cluster.pool.nodes()))
    deltas = await collect(cluster.dispatcher.generate(request))
    assert tokens_of(deltas) == expected_tokens(request.prompt_token_ids, 12, seed=7)
    await cluster.settle()
    return [delta.served_by for delta in deltas]


@pytest.mark.parametrize("home", [0, 1])
async def test_a_prompt_goes_to_the_nodes_that_told_of_it(home: int) -> None:
    async with fake_cluster(2, 2, {"max_local_prefill_tokens": 0}) as cluster:
        request = a_request(NUM_TOKENS)
        prefill, decode = cluster.prefill[home], cluster.decode[home]
        for node in (prefill, decode):
            tell(node, 1, keys_of(request))
            await until_known(cluster, node, NUM_TOKENS // BLOCK_SIZE)
        for _ in range(3):
            assert set(await generate(cluster, request)) == {prefill.address, decode.address}
        num_expected = 3 * (NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE)
        for role in Role:
            assert cluster.metric("kvasir:prefix_expected_tokens_total", role=role.value) == num_expected
        salted = [await generate(cluster, a_request(NUM_TOKENS, cache_salt="other")) for _ in range(2)]
        assert {served[0] for served in salted} == {node.address for node in cluster.prefill}, "nobody holds these"


async def test_a_decode_node_that_holds_nearly_all_prefills_the_rest() -> None:
    async with fake_cluster(1, 2) as cluster:
        request = a_request(NUM_TOKENS)
        before = cluster.prefill[0].num_started
        tell(cluster.decode[1], 1, keys_of(request))
        await until_known(cluster, cluster.decode[1], NUM_TOKENS // BLOCK_SIZE)
        assert set(await generate(cluster, request)) == {cluster.decode[1].address}
        assert cluster.prefill[0].num_started == before
        assert cluster.metric("kvasir:local_prefills_total", reason="cached") == 1


async def test_what_was_missed_is_asked_for_and_what_a_dead_node_held_is_forgotten() -> None:
    async with fake_cluster(1, 1) as cluster:
        node, keys = cluster.decode[0], keys_of(a_request(NUM_TOKENS))
        tell(node, 1, keys[:5])
        await until_known(cluster, node, 5)
        tell(node, 3, keys[5:])
        await until_known(cluster, node, 0)
        await until(lambda: node.num_snapshots_asked == 1)
        tell(node, 4, keys, snapshot=True)
        await until_known(cluster, node, len(keys))
        await node.restart()
        await until(lambda: [one.info.epoch for one in cluster.cluster.pool.nodes(Role.DECODE)] == [node.epoch])
        await until_known(cluster, node, 0)


async def test_what_was_looked_up_is_not_kept_while_the_request_runs() -> None:
    async with fake_cluster(1, 1, token_s=0.01) as cluster:
        node, request = cluster.prefill[0], a_request(NUM_TOKENS, max_tokens=200)
        tell(node, 1, keys_of(request))
        await until_known(cluster, node, NUM_TOKENS // BLOCK_SIZE)
        async with aclosing(cluster.dispatcher.generate(request)) as deltas:
            await anext(deltas)
            gc.collect()  # what other tests have left
            assert not any(type(one) is Prefix for one in gc.get_objects())
