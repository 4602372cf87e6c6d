"""A node in a process of its own, to be killed or frozen.

    python -m kvasir.kv_connector.testing.peer '{"role": "send", ...}'

send       publishes its blocks, says where, and stays
receive    fetches, sends the signal `then` to itself when the first block has landed, and says how it ended
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockKey, Endpoint, KVBlock, Ticket, TransferId
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, Node, open_node

LAYOUT = replace(LARGE, num_layers=32, num_kv_heads=8, total_kv_heads=8)  # 2 MiB: more than the kernel's buffers hold
NUM_BLOCKS = 24
_STAY_S = 120.0
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    role: str
    settings: dict[str, Any]
    transfer_id: str
    endpoint: str = ""
    then: int = 0


def settings_to_json(settings: ConnectorSettings) -> dict[str, Any]:
    """What differs from the defaults."""
    defaults = asdict(ConnectorSettings())
    return {name: value for name, value in asdict(settings).items() if value != defaults[name]}


def keys_of(transfer_id: str) -> list[BlockKey]:
    return [BlockKey(transfer_id.encode().ljust(30)[:30] + index.to_bytes(2, "little")) for index in range(NUM_BLOCKS)]


def ticket_of(transfer_id: str, connector: str, endpoint: str = "") -> Ticket:
    endpoints = (Endpoint(endpoint),) if endpoint else ()
    return Ticket(transfer_id=TransferId(transfer_id), connector=connector, endpoints=endpoints)


def blocks_of(keys: list[BlockKey]) -> list[KVBlock]:
    return [KVBlock(index, key, BlockId(index), 16) for index, key in enumerate(keys)]


@asynccontextmanager
async def node(settings: ConnectorSettings, seed: int) -> AsyncIterator[Node]:
    """What seed 1 holds, every process knows."""
    async with open_node(settings, LAYOUT, seed=seed, num_blocks=NUM_BLOCKS) as opened:
        yield opened


@asynccontextmanager
async def process(task: Task) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """The process, and what it says."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvasir.kv_connector.testing.peer", json.dumps(asdict(task))),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        assert child.stdout is not None
        yield child, child.stdout
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line_of(said: asyncio.StreamReader, beginning: str) -> str:
    """The rest of the first line that begins so; engines say other things too."""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while line := (await said.readline()).decode():
            if line.startswith(f"{beginning} "):
                return line.removeprefix(f"{beginning} ").strip()
    raise AssertionError("the other process has ended")


async def _send(task: Task) -> None:
    settings = ConnectorSettings(**task.settings)
    async with node(settings, seed=1) as opened:
        print("BEGINS .", flush=True)
        ticket = ticket_of(task.transfer_id, opened.connector.name)
        await opened.sender.publish(ticket, blocks_of(keys_of(task.transfer_id)))
        print(f"PUBLISHED {opened.connector.endpoint}", flush=True)
        await asyncio.sleep(_STAY_S)


async def _receive(task: Task) -> None:
    def strike(index: int, is_exact: bool = True) -> None:
        if landed.is_set():
            return
        landed.set()
        print("LANDED .", flush=True)
        os.kill(os.getpid(), task.then)

    settings, landed = ConnectorSettings(**task.settings), asyncio.Event()
    async with node(settings, seed=2) as opened:
        ticket = ticket_of(task.transfer_id, opened.connector.name, task.endpoint)
        transfer = opened.receiver.start(ticket, blocks_of(keys_of(task.transfer_id)), strike)
        transfer.progress(NUM_BLOCKS, committed=True)
        result = await transfer.done()
        misses = {reason.value: number for reason, number in opened.metrics.misses.items()}
        print("DONE", json.dumps({"fetched": result.num_fetched, "misses": misses}), flush=True)
        await asyncio.sleep(_STAY_S)


if __name__ == "__main__":
    task = Task(**json.loads(sys.argv[1]))
    asyncio.run(_send(task) if task.role == "send" else _receive(task))
