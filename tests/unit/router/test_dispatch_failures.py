"""What goes wrong on the way, and that the client gets the same tokens all the same."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from kvasir.common.errors import InvalidRequest, NodeUnavailable, NumericalError
from kvasir.common.grammar import Grammar
from kvasir.common.grpc_options import MAX_MESSAGE_BYTES
from kvasir.proto import common_pb2
from kvasir.router.types import RoutedRequest, Sampling, TokenDelta
from tests.fake_cluster import FakeCluster, a_request, collect, fake_cluster, tokens_of
from tests.fake_node import FakeNode
from tests.fake_request import expected_tokens
from tests.waiting import until

FAST_LOSS = {"heartbeat_timeout_s": 0.6, "node_wait_s": 60.0}
OVERLOADED = common_pb2.FAILURE_CODE_OVERLOADED
DRAINING = common_pb2.FAILURE_CODE_DRAINING
INTERNAL = common_pb2.FAILURE_CODE_INTERNAL


def right(request: RoutedRequest) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.sampling.max_tokens, request.sampling.seed)


async def some(deltas: AsyncGenerator[TokenDelta], count: int) -> list[TokenDelta]:
    async with asyncio.timeout(60):
        return [await anext(deltas) for _ in range(count)]


def at_work(nodes: list[FakeNode]) -> FakeNode:
    return next(node for node in nodes if not all(one.is_canary for one in node.requests))


@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_prefill_node_dies_before_the_first_token(num_prefill: int) -> None:
    async with fake_cluster(num_prefill, 1, FAST_LOSS) as cluster:
        for node in cluster.prefill:
            node.behaviour.chunk_s = 0.1
        request = a_request(600)
        answer = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
        await until(lambda: cluster.decode[0].num_blocks_fetched >= 8)
        await at_work(cluster.prefill).die()
        for node in cluster.prefill:
            node.behaviour.chunk_s = 0
        deltas = await answer
        assert tokens_of(deltas) == right(request)
        # With nobody else to prefill, the decode node keeps what has landed and computes the rest.
        served_first = cluster.decode if num_prefill == 1 else cluster.prefill
        assert deltas[0].served_by in [node.address for node in served_first]
        if num_prefill == 1:
            assert 0 < cluster.decode[0].num_tokens_recomputed < 600
        await cluster.settle()


async def test_prefill_node_dies_while_its_blocks_are_on_their_way() -> None:
    async with fake_cluster(config=FAST_LOSS) as cluster:
        cluster.decode[0].behaviour.fetch_s = 0.1
        request = a_request(320)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 1)
        await until(lambda: cluster.decode[0].num_blocks_fetched > 1)
        await cluster.prefill[0].die()
        assert tokens_of(head + await collect(deltas)) == right(request)
        assert 0 < cluster.decode[0].num_tokens_recomputed < 320
        await cluster.settle()


async def test_prefill_node_freezes_while_its_blocks_are_on_their_way() -> None:
    async with fake_cluster(config=FAST_LOSS) as cluster:
        cluster.decode[0].behaviour.fetch_s = 3600
        request = a_request(320)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 1)
        cluster.decode[0].behaviour.fetch_s = 0.05
        cluster.prefill[0].is_frozen = True
        fetching = cluster.decode[0].requests[0]
        assert fetching.task is not None
        await until(lambda: fetching.is_aborted)  # by the router, that no longer hears the prefill node
        cluster.prefill[0].is_frozen = False
        await deltas.aclose()
        assert tokens_of(head) == right(request)[:1]
        await cluster.settle()


@pytest.mark.parametrize("how", ["dies", "freezes", "restarts"])
async def test_decode_node_is_lost_in_mid_stream(how: str) -> None:
    async with fake_cluster(1, 2, FAST_LOSS, token_s=0.01) as cluster:
        request = a_request(max_tokens=60)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 20)
        lost = at_work(cluster.decode)
        if how == "dies":
            await lost.die()
        elif how == "restarts":
            await lost.restart()
        else:
            lost.is_frozen = True
        tail = await collect(deltas)
        assert tokens_of(head + tail) == right(request)
        assert len({delta.served_by for delta in head[1:] + tail} & {node.address for node in cluster.decode}) == 2
        assert cluster.metric("kvasir:dispatch_retries_total", reason="NodeUnavailable") == 1
        lost.is_frozen = False
        await cluster.settle()


async def test_the_only_decode_node_restarts_in_mid_stream() -> None:
    """The request waits for it to come back, and goes on there. Its connection ends, so no silence need be short."""
    config = {"heartbeat_timeout_s": 10.0, "node_wait_s": 60.0}
    async with fake_cluster(config=config, token_s=0.01) as cluster:
        request = a_request(max_tokens=60)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 20)
        await cluster.decode[0].restart()
        assert tokens_of(head + await collect(deltas)) == right(request)
        await cluster.settle()


async def test_nobody_comes_back() -> None:
    config = {"heartbeat_timeout_s": 0.5, "node_wait_s": 0.5}
    async with fake_cluster(config=config, token_s=0.01) as cluster:
        request = a_request(max_tokens=500)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 20)
        await cluster.decode[0].die()
        tail: list[TokenDelta] = []
        with pytest.raises(NodeUnavailable, match="no decode node"):
            async with asyncio.timeout(60):
                async for delta in deltas:
                    tail.append(delta)  # noqa: PERF401  (what came before the error counts)
        # None wrong: the prefill node alone may have gone on by a token.
        got = tokens_of(head + tail)
        assert got == right(request)[: len(got)]
        assert not cluster.dispatcher.is_ready
        await cluster.settle()


async def test_decode_node_says_no_and_the_prefill_goes_on() -> None:
    async with fake_cluster(1, 2) as cluster:
        for node in cluster.decode:
            node.behaviour.fail_starts = [OVERLOADED]
        request = a_request()
        assert tokens_of(await collect(cluster.dispatcher.generate(request))) == right(request)
        assert cluster.prefill[0].num_started == 1
        assert cluster.prefill[0].num_cancelled == 0
        assert sum(node.num_tokens_recomputed for node in cluster.decode) == 0
        tickets = {one.transfer_id for node in cluster.decode for one in node.started if len(one.prompt) == 40}
        assert len(tickets) == 1
        await cluster.settle()


async def test_decode_node_is_lost_before_it_spoke() -> None:
    """Another one takes the same ticket: the prompt is not computed twice."""
    async with fake_cluster(1, 2, FAST_LOSS) as cluster:
        for node in cluster.decode:
            node.behaviour.fetch_s = 0.1
        request = a_request(320)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 1)
        await at_work(cluster.decode).die()
        assert tokens_of(head + await collect(deltas)) == right(request)
        assert [len(one.prompt) for one in cluster.prefill[0].started].count(320) == 1
        await cluster.settle()


@pytest.mark.parametrize("code", [OVERLOADED, DRAINING, INTERNAL])
@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_prefill_node_says_no(code: int, num_prefill: int) -> None:
    async with fake_cluster(num_prefill, 1) as cluster:
        for node in cluster.prefill:
            node.behaviour.fail_starts = [code]
        request = a_request()
        assert tokens_of(await collect(cluster.dispatcher.generate(request))) == right(request)
        for node in cluster.prefill:
            node.behaviour.fail_starts = []
        await cluster.settle()


async def test_draining_decode_node_hands_its_requests_on() -> None:
    async with fake_cluster(1, 2, token_s=0.01) as cluster:
        request = a_request(max_tokens=60)
        deltas = cluster.dispatcher.generate(request)
        head = await some(deltas, 20)
        drained = at_work(cluster.decode)
        drained.behaviour.is_draining = True
        (session,) = drained.sessions.values()
        drained.fail(session, drained.requests[0].handle, DRAINING)
        assert tokens_of(head + await collect(deltas)) == right(request)
        num_started = drained.num_started
        for _ in range(4):
            await collect(cluster.dispatcher.generate(a_request()))
        assert drained.num_started == num_started
        await cluster.settle()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (common_pb2.FAILURE_CODE_INVALID_REQUEST, InvalidRequest),
        (common_pb2.FAILURE_CODE_NUMERICAL, NumericalError),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_requests_own_fault_is_not_tried_again(code: int, error: type[Exception], role: str) -> None:
    async with fake_cluster(2, 2) as cluster:
        for node in cluster.prefill if role == "prefill" else cluster.decode:
            node.behaviour.fail_starts = [code]
        with pytest.raises(error, match="as the test wants it"):
            await collect(cluster.dispatcher.generate(a_request()))
        num_started = {name: sum(node.num_started for node in getattr(cluster, name)) for name in ("prefill", "decode")}
        assert num_started[role] == 1
        assert max(num_started.values()) == 1  # the other tier may have been called off before it began
        for node in cluster.nodes:
            node.behaviour.fail_starts = []
        await cluster.settle()


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_what_is_too_long_for_a_message_fails_alone(num_prefill: int) -> None:
    """The node refused the message by ending the stream; the next one began with it again, and so for ever."""
    async with fake_cluster(num_prefill, 1) as cluster:
        deltas = cluster.dispatcher.generate(a_request(20, 200))
        head = await some(deltas, 1)
        grammar = Grammar("regex", "a" * MAX_MESSAGE_BYTES)
        too_long = replace(a_request(30), sampling=Sampling(grammar=grammar))
        with pytest.raises(InvalidRequest, match="33,554,432 at most are sent"):
            await collect(cluster.dispatcher.generate(too_long))
        assert tokens_of(head + await collect(deltas)) == right(a_request(20, 200))
        await cluster.settle()
        assert all(node.num_resumed == 0 for node in cluster.nodes)


async def test_a_request_that_kills_nodes_is_given_up() -> None:
    async with fake_cluster(0, 2, {"max_attempts": 3}) as cluster:
        for node in cluster.decode:
            node.behaviour.fail_starts = [INTERNAL] * 10
        with pytest.raises(NodeUnavailable, match="gave up after 3 failures"):
            await collect(cluster.dispatcher.generate(a_request()))
        await cluster.settle()


async def test_everything_at_once() -> None:
    """Random answers while nodes die and come back: each is complete and right."""
    config = {"heartbeat_timeout_s": 0.6, "node_wait_s": 60.0, "max_attempts": 50}
    async with fake_cluster(2, 2, config, token_s=0.005, chunk_s=0.01, fetch_s=0.001) as cluster:
        requests = [a_request(20 + 9 * index, 40, seed=index, first=index) for index in range(40)]
        answers = [asyncio.create_task(collect(cluster.dispatcher.generate(request))) for request in requests]
        for node in (*cluster.decode, *cluster.prefill):
            await asyncio.sleep(0.15)
            await node.restart()
        for request, answer in zip(requests, answers, strict=True):
            assert tokens_of(await answer) == right(request)
        await _comes_to_rest(cluster)


async def _comes_to_rest(cluster: FakeCluster) -> None:
    await until(lambda: len(cluster.cluster.pool.nodes()) == len(cluster.nodes))
    await cluster.settle()


async def test_a_no_does_not_let_a_later_request_overtake() -> None:
    """One seat. The node says no to the first request: the second must not get the seat that this leaves."""
    async with fake_cluster(0, 1, max_num_seqs=1) as cluster:
        cluster.decode[0].behaviour.fail_starts = [OVERLOADED]
        requests = [a_request(first=first) for first in (100, 200)]
        answers = [asyncio.create_task(collect(cluster.dispatcher.generate(request))) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert tokens_of(await answer) == right(request)
        assert [one.prompt[0] for one in cluster.decode[0].started] == [100, 100, 200]
        await cluster.settle()
