"""Several sequences of one prompt: one prefill, a seat for each, one stream; and what a lost node makes of them."""

import asyncio
from contextlib import aclosing

import pytest

from kvasir.common.seeds import sequence_seed
from kvasir.proto import common_pb2
from kvasir.router.types import Reader, RoutedRequest, Sampling
from tests.fake_cluster import FakeCluster, a_request, collect, fake_cluster, tokens_of
from tests.fake_request import expected_tokens
from tests.waiting import until

FAST_LOSS = {"heartbeat_timeout_s": 0.6, "node_wait_s": 60.0}


def expected(request: RoutedRequest, sequence: int) -> list[int]:
    sampling = request.sampling
    return expected_tokens(request.prompt_token_ids, sampling.max_tokens, sequence_seed(sampling.seed, sequence))


def outcomes(cluster: FakeCluster, outcome: str) -> float:
    return cluster.metric("kvasir:dispatch_requests_total", outcome=outcome)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_one_prompt_is_computed_once_for_all(num_prefill: int) -> None:
    async with fake_cluster(num_prefill) as cluster:
        before = outcomes(cluster, "length")
        request = a_request(num_sequences=4)
        deltas = await collect(cluster.dispatcher.generate(request))
        for sequence in range(4):
            assert tokens_of(deltas, sequence) == expected(request, sequence)
        assert [node.num_started for node in cluster.nodes] == [1] * (num_prefill + 1)
        assert [delta.num_cached_tokens for delta in deltas].count(0) == 1
        await cluster.settle()
        assert outcomes(cluster, "length") - before == 4


async def test_sequences_end_when_they_end() -> None:
    """Also with their first token, in which case the others go on; and with all first tokens, in which case none do."""
    async with fake_cluster() as cluster:
        request = a_request(num_sequences=3)
        firsts = [expected(request, sequence)[0] for sequence in range(3)]
        for ended in (0, 2):
            answer = await collect(cluster.dispatcher.generate(a_request(num_sequences=3, stop=[firsts[ended]])))
            assert tokens_of(answer, ended) == [firsts[ended]]
            assert all(tokens_of(answer, other) == expected(request, other) for other in {0, 1, 2} - {ended})
            await cluster.settle()
        answer = await collect(cluster.dispatcher.generate(a_request(num_sequences=3, stop=firsts)))
        assert [tokens_of(answer, sequence) for sequence in range(3)] == [[first] for first in firsts]
        await cluster.settle()


async def test_a_reader_may_stop_one_sequence_and_read_on() -> None:
    async with fake_cluster(token_s=0.005, most_tokens=30) as cluster:
        decode, request, reader = cluster.decode[0], a_request(max_tokens=60, num_sequences=3), Reader()
        lengths = [0, 0, 0]

        async def go_on_when_it_has_stopped() -> None:
            await until(lambda: decode.num_sequences_cancelled == 1)
            decode.behaviour.most_tokens = None

        async with asyncio.TaskGroup() as tasks, asyncio.timeout(60):
            tasks.create_task(go_on_when_it_has_stopped())
            async with aclosing(cluster.dispatcher.generate(request, reader)) as deltas:
                async for delta in deltas:
                    lengths[delta.sequence] += len(delta.token_ids)
                    if delta.sequence == 1 and lengths[1] == 5:
                        reader.stop(1)
        assert (lengths[0], lengths[2]) == (60, 60)
        assert 5 <= lengths[1] < 60
        assert decode.num_sequences_cancelled == 1
        assert outcomes(cluster, "abort") == 1
        await cluster.settle()


async def test_a_reader_that_stops_all_has_ended_it() -> None:
    async with fake_cluster(token_s=0.005) as cluster:
        reader = Reader()
        deltas = cluster.dispatcher.generate(a_request(max_tokens=2000, num_sequences=2), reader)
        async with asyncio.timeout(60):
            await anext(deltas)
            reader.stop(0)
            reader.stop(1)
            async for _ in deltas:
                pass
        await cluster.settle()


async def test_a_client_that_leaves_takes_all_sequences_with_it() -> None:
    async with fake_cluster(token_s=0.005) as cluster:
        async with (
            asyncio.timeout(60),
            aclosing(cluster.dispatcher.generate(a_request(max_tokens=2000, num_sequences=8))) as deltas,
        ):
            for _ in range(20):
                await anext(deltas)
        await cluster.settle()
        assert outcomes(cluster, "abort") == 8


async def test_a_decode_node_that_is_lost_parts_them_and_changes_no_token() -> None:
    """One has ended by then, and one was stopped by its reader: they stay ended."""
    async with fake_cluster(1, 2, FAST_LOSS, most_tokens=6) as cluster:

        def go_on(most_tokens: int | None) -> None:
            for node in cluster.decode:
                node.behaviour.most_tokens = most_tokens

        request, reader = a_request(max_tokens=30, num_sequences=4), Reader()
        ends_early = next(token for token in expected(request, 2)[3:] if token not in expected(request, 0)[:8])
        request = a_request(max_tokens=30, num_sequences=4, stop=[ends_early])
        answers: list[list[int]] = [[] for _ in range(4)]
        reasons: list[str | None] = [None] * 4
        async with asyncio.timeout(60), aclosing(cluster.dispatcher.generate(request, reader)) as deltas:
            async for delta in deltas:
                answers[delta.sequence] += delta.token_ids
                reasons[delta.sequence] = delta.finish_reason
                if delta.sequence == 3 and len(answers[3]) == 6:
                    reader.stop(3)
                    go_on(8)
                if delta.sequence == 0 and len(answers[0]) == 8:
                    await next(node for node in cluster.decode if node.requests).die()
                    go_on(None)
        for sequence in (0, 1, 2):
            whole = expected(request, sequence)
            end = whole.index(ends_early) + 1 if ends_early in whole else 30
            assert answers[sequence] == whole[:end]
            assert reasons[sequence] == ("stop" if ends_early in whole else "length")
        assert answers[3] == expected(request, 3)[:6]
        await cluster.settle()


async def test_a_prefill_node_that_is_lost_before_the_first_tokens_costs_nothing_but_time() -> None:
    async with fake_cluster(1, 1, FAST_LOSS, chunk_s=0.05) as cluster:
        request = a_request(600, num_sequences=3)
        answer = asyncio.create_task(collect(cluster.dispatcher.generate(request)))
        await until(lambda: cluster.decode[0].num_blocks_fetched >= 8)
        await cluster.prefill[0].die()
        deltas = await answer
        assert all(tokens_of(deltas, sequence) == expected(request, sequence) for sequence in range(3))
        await cluster.settle()


async def test_a_decode_node_that_says_no_is_replaced_under_the_same_ticket() -> None:
    async with fake_cluster(1, 2) as cluster:
        cluster.decode[0].behaviour.fail_starts.append(common_pb2.FAILURE_CODE_OVERLOADED)
        for _ in range(2):
            request = a_request(num_sequences=3)
            deltas = await collect(cluster.dispatcher.generate(request))
            assert all(tokens_of(deltas, sequence) == expected(request, sequence) for sequence in range(3))
        await cluster.settle()


async def test_more_sequences_than_a_node_has_seats_are_placed_when_it_is_empty() -> None:
    async with fake_cluster(max_num_seqs=4, token_s=0.01) as cluster:
        first = asyncio.create_task(collect(cluster.dispatcher.generate(a_request(max_tokens=20))))
        await until(lambda: cluster.decode[0].requests != [])
        many = asyncio.create_task(collect(cluster.dispatcher.generate(a_request(num_sequences=9))))
        await until(lambda: cluster.cluster.queue.num_waiting == 1)
        assert len(tokens_of(await first)) == 20
        deltas = await many
        assert {len(tokens_of(deltas, sequence)) for sequence in range(9)} == {12}
        await cluster.settle()


def scored(num_prompt_tokens: int = 40) -> RoutedRequest:
    sampling = Sampling(max_tokens=3, seed=7, prompt_logprobs=0)
    return RoutedRequest(request_id="r", prompt_token_ids=tuple(range(num_prompt_tokens)), sampling=sampling)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_the_prompts_own_logprobs_come_once_from_who_computes_it(num_prefill: int) -> None:
    async with fake_cluster(num_prefill) as cluster:
        deltas = await collect(cluster.dispatcher.generate(scored()))
        assert [position.entries[0] for position in deltas[0].prompt_logprobs] == [(i, -i) for i in range(1, 40)]
        assert not any(delta.prompt_logprobs for delta in deltas[1:])
        await cluster.settle()


async def test_a_prompt_that_is_half_scored_is_scored_anew() -> None:
    """The prefill node is lost: what the decode node has got says nothing of how likely its tokens were."""
    async with fake_cluster(1, 1, FAST_LOSS, chunk_s=0.05) as cluster:
        answer = asyncio.create_task(collect(cluster.dispatcher.generate(scored(600))))
        await until(lambda: cluster.decode[0].num_blocks_fetched >= 8)
        await cluster.prefill[0].die()
        deltas = await answer
        assert len(deltas[0].prompt_logprobs) == 599
        assert tokens_of(deltas) == expected_tokens(tuple(range(600)), 3, seed=7)
        assert cluster.decode[0].num_started == 2, "begun anew, without a ticket"
        await cluster.settle()
