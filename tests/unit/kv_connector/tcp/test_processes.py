"""The tcp connector when the process at the other end is killed or frozen."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import Endpoint, KVBlock, Ticket, TransferId
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import open_node, until
from kvasir.kv_connector.testing import peer as processes
from tests.unit.kv_connector.tcp.peer_process import HUGE, keys_of

REPO = Path(__file__).resolve().parents[4]
NUM_BLOCKS = 24
START_S = 60.0
DEADLINE_S = 60.0
# Of few blocks: most have not been asked for when the first has landed.
SETTINGS: dict[str, Any] = {"name": "tcp", "secret": "s", "window_bytes": 16 << 20}


@asynccontextmanager
async def peer(role: str, **task: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and the first line that it says."""
    argument = json.dumps({"settings": SETTINGS, "num_blocks": NUM_BLOCKS, **task})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.unit.kv_connector.tcp.peer_process", role, argument),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{REPO}/src:{REPO}"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_freezes_in_mid_transfer(how: signal.Signals) -> None:
    landed: list[int] = []
    settings = ConnectorSettings(**SETTINGS, fetch_timeout_base_s=DEADLINE_S)  # its silence is noticed sooner
    async with (
        peer("send") as (process, address),
        open_node(settings, HUGE, seed=2, num_blocks=NUM_BLOCKS) as node,
        asyncio.timeout(DEADLINE_S),
    ):

        def strike(index: int, is_exact: bool) -> None:
            if not landed:
                process.send_signal(how)
            landed.append(index)

        wanted = [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(keys_of(NUM_BLOCKS))]
        ticket = Ticket(transfer_id=TransferId("t"), connector="tcp", endpoints=(Endpoint(address),))
        transfer = node.receiver.start(ticket, wanted, strike)
        transfer.progress(NUM_BLOCKS, committed=True)
        result = await transfer.done()
        assert 1 <= result.num_fetched == len(landed) < NUM_BLOCKS
        assert node.metrics.misses == {MissReason.PEER_LOST: NUM_BLOCKS - len(landed)}
        assert node.memory.writes == {BlockId(index): 1 for index in landed}
        if how is signal.SIGSTOP:  # late bytes find nobody who would write them
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
            assert node.memory.writes.total() == len(landed)


async def test_a_receiver_that_freezes_gives_the_blocks_back_when_zmq_lets_go() -> None:
    """Not before: what zmq still reads must not be written by the next owner. And not only at the lease's end."""
    num_published = NUM_BLOCKS + 4
    async with (
        open_node(ConnectorSettings(**SETTINGS, lease_s=1000), HUGE, seed=1, num_blocks=num_published) as node,
        asyncio.timeout(START_S + DEADLINE_S),
    ):
        ticket = Ticket(transfer_id=TransferId("t"), connector="tcp")
        outgoing = [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(keys_of(num_published))]
        await node.sender.publish(ticket, outgoing)
        async with peer("ask", address=node.connector.endpoint) as (_, line):
            assert line == "landed"
            await until(lambda: node.metrics.blocks_sent == NUM_BLOCKS)
            node.sender.abort(ticket.transfer_id)
            held = node.sender.num_leased_blocks
            assert 0 < held <= NUM_BLOCKS  # what nobody asked for came back at once
            assert node.released.total() == num_published - held
            await until(lambda: node.sender.num_leased_blocks == 0)
        assert node.released == {BlockId(index): 1 for index in range(num_published)}


async def test_a_receiver_that_was_frozen_goes_on_where_it_was() -> None:
    """For longer than a block may take, and than its sender keeps the connection: it asks anew, and blames nobody."""
    name, settings = "frozen", ConnectorSettings(**SETTINGS, fetch_timeout_base_s=2.5)
    async with processes.node(settings, seed=1) as node, asyncio.timeout(START_S + DEADLINE_S):
        await node.sender.publish(processes.ticket_of(name, "tcp"), processes.blocks_of(processes.keys_of(name)))
        task = processes.Task(
            role="receive",
            settings=processes.settings_to_json(settings),
            transfer_id=name,
            endpoint=node.connector.endpoint,
            then=signal.SIGSTOP,
        )
        async with processes.process(task) as (process, said):
            await processes.line_of(said, "LANDED")
            await asyncio.sleep(3.2)
            process.send_signal(signal.SIGCONT)
            outcome = json.loads(await processes.line_of(said, "DONE"))
        assert outcome == {"fetched": processes.NUM_BLOCKS, "misses": {}}
