"""The process at the other end is killed, or frozen, in the middle of a transfer."""

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import ArrayMemory, Node, peer, until

_DEADLINE_S = 90.0  # both processes start
_STRIKES = [signal.SIGKILL, signal.SIGSTOP]
_NUM_BLOCKS = peer.NUM_BLOCKS


def _hasty(settings: ConnectorSettings) -> ConnectorSettings:
    if settings.name == "memory":
        pytest.skip("within one process only")
    return replace(settings, fetch_timeout_base_s=2.0, lease_s=3.0)


@asynccontextmanager
async def receiver_and_sender(
    settings: ConnectorSettings,
) -> AsyncIterator[tuple[Node, asyncio.subprocess.Process, asyncio.StreamReader, str]]:
    """A node of ours, and another process that publishes under the name that comes last."""
    name = uuid.uuid4().hex[:16]
    task = peer.Task(role="send", settings=peer.settings_to_json(settings), transfer_id=name)
    async with asyncio.timeout(_DEADLINE_S), peer.process(task) as (process, said), peer.node(settings, seed=2) as node:
        yield node, process, said, name


def landed_is_right(node: Node, landed: list[int]) -> None:
    sent = ArrayMemory(peer.LAYOUT, _NUM_BLOCKS, seed=1)
    assert all(node.memory.read(BlockId(index)) == sent.read(BlockId(index)) for index in landed)
    assert node.memory.writes == {BlockId(index): 1 for index in landed}


@pytest.mark.parametrize("strike", _STRIKES)
async def test_a_sender_that_stops_in_mid_transfer(settings: ConnectorSettings, strike: signal.Signals) -> None:
    async with receiver_and_sender(_hasty(settings)) as (node, process, said, name):
        landed: list[int] = []

        def on_block(index: int, is_exact: bool = True) -> None:
            if not landed:
                process.send_signal(strike)
            landed.append(index)

        ticket = peer.ticket_of(name, node.connector.name, await peer.line_of(said, "PUBLISHED"))
        transfer = node.receiver.start(ticket, peer.blocks_of(peer.keys_of(name)), on_block)
        transfer.progress(_NUM_BLOCKS, committed=True)
        result = await transfer.done()
        assert sorted([*landed, *result.missing]) == list(range(_NUM_BLOCKS))
        landed_is_right(node, landed)
        if node.connector.is_store:
            assert not result.missing
        if strike is signal.SIGSTOP:  # late bytes find nobody who would write them
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
            landed_is_right(node, landed)


@pytest.mark.parametrize("strike", _STRIKES)
async def test_a_receiver_that_stops_in_mid_transfer(settings: ConnectorSettings, strike: signal.Signals) -> None:
    """Its blocks come back, each once, when the lease has ended and the transport has let go."""
    settings, name = _hasty(settings), uuid.uuid4().hex[:16]
    async with asyncio.timeout(_DEADLINE_S), peer.node(settings, seed=1) as node:
        await node.sender.publish(peer.ticket_of(name, node.connector.name), peer.blocks_of(peer.keys_of(name)))
        own = peer.settings_to_json(settings)
        endpoint = node.connector.endpoint
        task = peer.Task(role="receive", settings=own, transfer_id=name, endpoint=endpoint, then=strike)
        keeping = asyncio.create_task(_keep_alive(node, name))  # until the other process has started
        async with peer.process(task) as (_, said):
            await peer.line_of(said, "LANDED")
            keeping.cancel()
            await until(lambda: node.sender.num_leased_blocks == 0)
        assert node.released == {BlockId(index): 1 for index in range(_NUM_BLOCKS)}


async def _keep_alive(node: Node, name: str) -> None:
    while True:
        node.sender.commit(peer.ticket_of(name, node.connector.name).transfer_id)
        await asyncio.sleep(0.5)


async def test_a_writer_that_is_killed_leaves_nothing_torn(settings: ConnectorSettings) -> None:
    """A store has each block, or has it not."""
    async with receiver_and_sender(_hasty(settings)) as (node, process, said, name):
        if not node.connector.is_store:
            pytest.skip("no store")
        keys = peer.keys_of(name)
        await peer.line_of(said, "BEGINS")
        while not await node.receiver.lookup(keys[:1]):  # noqa: ASYNC110  (another process does)
            await asyncio.sleep(0.001)
        process.kill()
        await process.wait()
        landed: list[int] = []
        result = await node.receiver.fetch_stored(peer.blocks_of(keys), lambda index, *_: landed.append(index)).done()
        assert sorted([*landed, *result.missing]) == list(range(_NUM_BLOCKS))
        assert 0 in landed
        landed_is_right(node, landed)
