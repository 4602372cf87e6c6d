"""A prompt computed on one node, continued on the other: real sessions, real connectors, real engines, no torch."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.proto import common_pb2, decode_pb2
from tests.unit.node.fakes import (
    BLOCK_SIZE,
    WITHIN_S,
    Running,
    continue_decode,
    generate,
    pair,
    progress,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)

CONNECTORS = ["memory", "tcp", "shared_storage"]
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 50]


def settings(connector: str, tmp_path: Path) -> ConnectorSettings:
    return ConnectorSettings(name=connector, path=str(tmp_path / "kv"), lease_s=30)


async def run(
    sender: Running, receiver: Running, handle: int, prompt: list[int], num_tokens: int, salt: str = ""
) -> list[int]:
    """The router's part, by hand: both at once, progress passed on, first token handed over."""
    ticket = ticket_for(sender, f"t{handle}")
    what = request(prompt, num_tokens, cache_salt=salt)
    await receiver.send(**start_decode(handle, what, ticket))
    await sender.send(**start_prefill(handle, what, ticket))
    await pass_progress_on(sender, receiver, handle)
    await sender.ends(handle)
    assert sender.finished[handle] == common_pb2.FINISH_REASON_HANDED_OFF
    await receiver.send(**continue_decode(handle, sender.outputs[handle]))
    await receiver.ends(handle)
    assert handle not in receiver.failed, receiver.failed[handle]
    return sender.outputs[handle] + receiver.outputs[handle]


async def pass_progress_on(sender: Running, receiver: Running, handle: int) -> list[int]:
    """Until the ticket is committed; how far it was each time."""
    told = []
    async with asyncio.timeout(WITHIN_S):
        while True:
            news = await sender.progress_of[handle].get()
            await receiver.send(**progress(handle, news.num_blocks, news.committed))
            told.append(news.num_blocks)
            if news.committed:
                return told


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_tokens_equal_those_of_one_node_and_nothing_is_computed_twice(connector: str, tmp_path: Path) -> None:
    async with pair(settings(connector, tmp_path)) as (sender, receiver):
        for handle, length in enumerate(LENGTHS, start=1):
            prompt = [(handle * 100 + i) % 997 for i in range(length)]
            assert await run(sender, receiver, handle, prompt, 6) == generate(prompt, 6)
            await receiver.until(lambda h=handle: h in receiver.transfers)
            report = receiver.transfers[handle]
            assert report.num_blocks_fetched == -(-length // BLOCK_SIZE)
            assert report.num_tokens_recomputed == 0
        assert receiver.node.engine.stats().num_recomputed_tokens == 0
        assert receiver.node.engine.stats().num_prompt_tokens_computed == 0
        await sender.until(lambda: sender.node.sender.num_leased_blocks == 0)


async def test_a_long_prompt_travels_chunk_by_chunk(tmp_path: Path) -> None:
    """The first blocks land while the engine is held back from computing the last ones."""
    async with pair(settings("tcp", tmp_path)) as (sender, receiver):
        step = threading.Semaphore(2)
        sender.runner.before_step = lambda: step.acquire(timeout=WITHIN_S)
        what, ticket = request(list(range(50)), 3), ticket_for(sender)
        await receiver.send(**start_decode(1, what, ticket))
        await sender.send(**start_prefill(1, what, ticket))
        passing = asyncio.create_task(pass_progress_on(sender, receiver, 1))
        await receiver.until(lambda: landed(receiver) == 4)
        assert 1 not in sender.outputs
        step.release(10)
        told = await passing
        assert told == sorted(set(told))
        assert told[-1] == 13
        await receiver.until(lambda: 1 in receiver.transfers)
        assert receiver.transfers[1].num_blocks_fetched == 13


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_what_the_decode_node_holds_already_is_not_fetched(connector: str, tmp_path: Path) -> None:
    async with pair(settings(connector, tmp_path)) as (sender, receiver):
        prompt = list(range(30))
        first = await run(sender, receiver, 1, prompt, 6)
        assert await run(sender, receiver, 2, prompt, 6) == first
        assert receiver.transfers[2].num_blocks_cached == 7
        assert receiver.transfers[2].num_blocks_fetched == 1
        assert sender.admitted[2].num_cached_tokens == 28


async def test_a_lost_sender_costs_computing_and_nothing_else(tmp_path: Path) -> None:
    """Half of the blocks land, then no more will come and no first token either."""
    async with pair(settings("tcp", tmp_path)) as (sender, receiver):
        prompt = list(range(100, 140))
        ticket = ticket_for(sender)
        await receiver.send(**start_decode(1, request(prompt, 6), ticket))
        await sender.send(**start_prefill(1, request(prompt, 6), ticket))
        await sender.until(lambda: sender.is_committed(1))
        await receiver.send(**progress(1, 5, False))
        await receiver.until(lambda: landed(receiver) == 5)
        await receiver.send(abort_transfer=decode_pb2.AbortTransfer(handle=1, reason="the prefill node is lost"))
        await receiver.send(**continue_decode(1, []))
        await receiver.ends(1)
        assert receiver.outputs[1] == generate(prompt, 6)
        report = receiver.transfers[1]
        assert (report.num_blocks_fetched, report.num_tokens_recomputed) == (5, 20)
        assert receiver.node.engine.stats().num_recomputed_tokens == 20
        await sender.until(lambda: sender.node.sender.num_leased_blocks == 0)


def landed(receiver: Running) -> int:
    return sum(receiver.node.parts.memory.writes.values())
