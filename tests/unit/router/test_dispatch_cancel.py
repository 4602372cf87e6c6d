"""Clients that leave: nothing of theirs stays anywhere."""

import asyncio
import random
from contextlib import aclosing

import pytest

from kvasir.common.errors import Overloaded
from tests.fake_cluster import a_request, collect, fake_cluster, tokens_of
from tests.fake_request import expected_tokens
from tests.waiting import until


async def test_two_hundred_clients_leave_at_random_points() -> None:
    dice = random.Random(11)
    async with fake_cluster(2, 2, chunk_s=0.002, fetch_s=0.001, token_s=0.002) as cluster:
        tasks_before = len(asyncio.all_tasks())

        async def leave_after(num_deltas: int, index: int) -> None:
            request = a_request(dice.randrange(1, 300), 400, seed=index, first=index)
            async with asyncio.timeout(60), aclosing(cluster.dispatcher.generate(request)) as deltas:
                for _ in range(num_deltas):
                    await anext(deltas)
                if num_deltas == 0:  # while it waits in the queue, or is being computed
                    waiting = asyncio.ensure_future(anext(deltas))
                    await asyncio.wait([waiting], timeout=dice.uniform(0, 0.1))
                    waiting.cancel()
                    await asyncio.gather(waiting, return_exceptions=True)

        for start in range(0, 200, 25):
            leavers = (leave_after(dice.choice([0, 0, 1, 2, 5, 20]), index) for index in range(start, start + 25))
            await asyncio.gather(*leavers)
        await cluster.settle()
        assert sum(node.num_cancelled for node in cluster.nodes) > 50
        assert cluster.metric("kvasir:dispatch_requests_total", outcome="abort") == 200
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
        request = a_request()
        assert tokens_of(await collect(cluster.dispatcher.generate(request))) == expected_tokens(
            request.prompt_token_ids, 12, seed=7
        )


async def test_client_that_leaves_between_two_tokens_frees_the_seat_at_once() -> None:
    async with fake_cluster(token_s=0.005) as cluster:
        async with aclosing(cluster.dispatcher.generate(a_request(max_tokens=2000))) as deltas:
            async with asyncio.timeout(60):
                for _ in range(10):
                    await anext(deltas)
        assert cluster.dispatcher.num_in_flight == 0
        assert not any(node.reservations for node in cluster.cluster.pool.nodes())
        await cluster.settle()


async def test_client_that_never_reads_costs_no_more_than_its_tokens() -> None:
    """What nodes say is acted on whether or not anybody asks for the next token."""
    async with fake_cluster() as cluster:
        deltas = cluster.dispatcher.generate(a_request())
        async with asyncio.timeout(60):
            first = await anext(deltas)
        await cluster.settle()
        assert tokens_of([first, *await collect(deltas)]) == expected_tokens(a_request().prompt_token_ids, 12, seed=7)


async def test_a_request_that_left_the_queue_never_reaches_a_node() -> None:
    """One seat. A runs; five wait and their clients leave; then B comes, and starts right after A."""
    async with fake_cluster(max_num_seqs=1, most_tokens=10) as cluster:  # A runs until B is there
        first = asyncio.create_task(collect(cluster.dispatcher.generate(a_request(max_tokens=60, first=500))))
        await until(lambda: cluster.prefill[0].num_tokens_prefilled == 40 and cluster.decode[0].requests != [])
        leavers = [asyncio.create_task(collect(cluster.dispatcher.generate(a_request()))) for _ in range(5)]
        await until(lambda: cluster.cluster.queue.num_waiting == 5)
        last = asyncio.create_task(collect(cluster.dispatcher.generate(a_request(16, first=300))))
        await until(lambda: cluster.cluster.queue.num_waiting == 6)
        for leaver in leavers:
            leaver.cancel()
        await until(lambda: cluster.cluster.queue.num_waiting == 1)
        cluster.decode[0].behaviour.most_tokens = None
        assert len(await first) == 60
        assert len(await last) == 12
        assert cluster.prefill[0].num_tokens_prefilled == 40 + 16
        assert cluster.prefill[0].num_started == 2
        await cluster.settle()


async def test_a_full_queue_says_so_and_when_to_come_back() -> None:
    config = {"max_num_queued_reqs": 3}
    async with fake_cluster(config=config, max_num_seqs=1, most_tokens=6) as cluster:  # none ends
        answers = []
        for _ in range(4):  # one runs, three wait
            answers.append(asyncio.create_task(collect(cluster.dispatcher.generate(a_request()))))
            await until(lambda: cluster.dispatcher.num_in_flight == len(answers))
        await until(lambda: cluster.cluster.queue.num_waiting == 3)
        with pytest.raises(Overloaded) as caught:
            await collect(cluster.dispatcher.generate(a_request()))
        assert caught.value.retry_after_s >= 1
        cluster.decode[0].behaviour.most_tokens = None
        for answer in answers:
            assert len(await answer) == 12
        await cluster.settle()


async def test_priority_goes_before_arrival() -> None:
    async with fake_cluster(max_num_seqs=1, most_tokens=10) as cluster:  # the first runs until all are there
        order: list[int] = []

        async def ask(priority: int) -> None:
            await collect(cluster.dispatcher.generate(a_request(priority=priority, max_tokens=20)))
            order.append(priority)

        tasks = [asyncio.create_task(ask(0))]
        await until(lambda: cluster.decode[0].requests != [])
        for priority in (5, 1, 5, -3):
            tasks.append(asyncio.create_task(ask(priority)))
            await until(lambda: cluster.cluster.queue.num_waiting == len(tasks) - 1)
        cluster.decode[0].behaviour.most_tokens = None
        await asyncio.gather(*tasks)
        assert order == [0, -3, 1, 5, 5]


async def test_prefill_node_is_never_given_more_than_about_two_chunks() -> None:
    async with fake_cluster(chunk_tokens=64, chunk_s=0.01) as cluster:
        answers = [asyncio.create_task(collect(cluster.dispatcher.generate(a_request(60)))) for _ in range(12)]
        most = 0
        while not all(answer.done() for answer in answers):
            most = max(most, sum(len(one.prompt) for one in cluster.prefill[0].requests))
            await asyncio.sleep(0.002)
        assert 60 < most <= 2 * 64 + 60
        await cluster.settle()


async def test_many_requests_through_a_small_cache() -> None:
    """Two fit at a time; all are answered, in turn, and the decode node never has to say no for long."""
    async with fake_cluster(num_blocks=12, token_s=0.001) as cluster:
        requests = [a_request(70, 12, seed=index) for index in range(12)]
        answers = await asyncio.gather(*(collect(cluster.dispatcher.generate(request)) for request in requests))
        for request, deltas in zip(requests, answers, strict=True):
            assert tokens_of(deltas) == expected_tokens(request.prompt_token_ids, 12, request.sampling.seed)
        await cluster.settle()
