"""The life of a request where nothing goes wrong."""

import asyncio
from contextlib import aclosing

import pytest

from kvasir.common.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from kvasir.router.nodes import Role
from tests.fake_cluster import a_request, collect, fake_cluster, tokens_of
from tests.fake_request import expected_tokens
from tests.waiting import until


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 48, 200])
async def test_tokens_come_from_both_tiers_in_order(num_prompt_tokens: int) -> None:
    async with fake_cluster() as cluster:
        request = a_request(num_prompt_tokens)
        deltas = await collect(cluster.dispatcher.generate(request))
        assert tokens_of(deltas) == expected_tokens(request.prompt_token_ids, 12, seed=7)
        assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
        assert deltas[0].served_by == cluster.prefill[0].address
        assert {delta.served_by for delta in deltas[1:]} == {cluster.decode[0].address}
        assert cluster.decode[0].num_blocks_fetched == -(-num_prompt_tokens // 16)
        assert cluster.decode[0].num_tokens_recomputed == 0
        await cluster.settle()


async def test_first_token_that_ends_the_request_lets_the_decode_node_go() -> None:
    async with fake_cluster() as cluster:
        deltas = await collect(cluster.dispatcher.generate(a_request(max_tokens=1)))
        assert [delta.finish_reason for delta in deltas] == ["length"]
        request = a_request(max_tokens=5)
        first = expected_tokens(request.prompt_token_ids, 1, seed=7)[0]
        deltas = await collect(cluster.dispatcher.generate(a_request(max_tokens=5, stop=[first])))
        assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [((first,), "stop")]
        await cluster.settle()
        assert cluster.decode[0].num_cancelled == 2


async def test_first_token_does_not_wait_for_the_transfer() -> None:
    async with fake_cluster() as cluster:
        cluster.decode[0].behaviour.fetch_s = 3600
        async with aclosing(cluster.dispatcher.generate(a_request())) as deltas, asyncio.timeout(60):
            first = await anext(deltas)
        assert first.served_by == cluster.prefill[0].address
        assert first.num_cached_tokens == 0
        await cluster.settle()


async def test_without_prefill_nodes_the_decode_node_prefills() -> None:
    async with fake_cluster(num_prefill=0) as cluster:
        request = a_request()
        deltas = await collect(cluster.dispatcher.generate(request))
        assert tokens_of(deltas) == expected_tokens(request.prompt_token_ids, 12, seed=7)
        assert cluster.metric("kvasir:dispatch_attempts_total", prefill="local") == 2  # the canary's and ours
        await cluster.settle()


async def test_many_at_once_over_two_and_two() -> None:
    async with fake_cluster(2, 2, token_s=0.002, chunk_s=0.002) as cluster:
        requests = [a_request(20 + 7 * index, seed=index, first=index) for index in range(40)]
        answers = await asyncio.gather(*(collect(cluster.dispatcher.generate(request)) for request in requests))
        for request, deltas in zip(requests, answers, strict=True):
            assert tokens_of(deltas) == expected_tokens(request.prompt_token_ids, 12, request.sampling.seed)
        assert all(node.num_started > 5 for node in cluster.nodes)
        await cluster.settle()


async def test_a_decode_node_that_freezes_holds_up_nobody() -> None:
    """Its port stays open and it says nothing: once this stood still for those on healthy nodes, too."""
    async with fake_cluster(1, 2, {"heartbeat_timeout_s": 0.6}, token_s=0.005) as cluster:
        frozen, healthy = cluster.decode
        requests = [a_request(20 + index, 20, seed=index, first=index) for index in range(40)]
        answers = [asyncio.create_task(collect(cluster.dispatcher.generate(request))) for request in requests]
        await until(lambda: any(one.outputs != [[]] for one in frozen.requests if not one.is_canary))
        frozen.is_frozen = True
        for request, answer in zip(requests, answers, strict=True):
            expected = expected_tokens(request.prompt_token_ids, 20, request.sampling.seed)
            assert tokens_of(await answer) == expected
        await until(lambda: len(cluster.cluster.pool.nodes(Role.DECODE)) == 1)
        for deltas in await asyncio.gather(*(collect(cluster.dispatcher.generate(a_request())) for _ in range(8))):
            assert {delta.served_by for delta in deltas[1:]} == {healthy.address}
        frozen.is_frozen = False
        await cluster.settle()


async def test_too_long_a_prompt_is_refused_at_the_door() -> None:
    async with fake_cluster(num_blocks=10) as cluster:
        assert cluster.dispatcher.limits().max_prompt_tokens == 159
        with pytest.raises(InvalidRequest, match="160 tokens, at most 159") as caught:
            await collect(cluster.dispatcher.generate(a_request(160)))
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        with pytest.raises(InvalidRequest, match="empty"):
            await collect(cluster.dispatcher.generate(a_request(0)))
        assert not any(node.num_started for node in cluster.nodes)
        deltas = await collect(cluster.dispatcher.generate(a_request(150, max_tokens=1000)))
        assert len(tokens_of(deltas)) == 10  # as many as fit
        assert deltas[-1].finish_reason == "length"


async def test_deadline_ends_a_request_everywhere() -> None:
    async with fake_cluster(token_s=0.02) as cluster:
        with pytest.raises(DeadlineExceeded):
            await collect(cluster.dispatcher.generate(a_request(max_tokens=3000, deadline_s=0.3)))
        await cluster.settle()
        assert cluster.metric("kvasir:dispatch_requests_total", outcome="DeadlineExceeded") == 1


async def test_without_a_decode_node_nothing_is_promised() -> None:
    async with fake_cluster(num_decode=0) as cluster:
        await until(lambda: bool(cluster.cluster.pool.nodes()))
        assert not cluster.dispatcher.is_ready
        with pytest.raises(NodeUnavailable):
            cluster.dispatcher.limits()
        with pytest.raises(NodeUnavailable):
            await collect(cluster.dispatcher.generate(a_request()))
