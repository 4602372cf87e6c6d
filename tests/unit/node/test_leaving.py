"""A request is cancelled at each point of its way through two nodes: every block, lease and seat comes back."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.proto import common_pb2
from tests.unit.node.fakes import (
    WITHIN_S,
    Running,
    continue_decode,
    generate,
    pair,
    prefill,
    progress,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)
from tests.unit.node.test_pair import run

TIMES = 10
PROMPT = list(range(41))


def cancel(handle: int) -> dict[str, common_pb2.CancelRequest]:
    return {"cancel": common_pb2.CancelRequest(handle=handle)}


class Steps:
    """Lets a node's engine make so many steps, and no more."""

    def __init__(self, node: Running) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        node.runner.before_step = self._wait

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release(100)

    def _wait(self) -> None:
        if not self._is_open:
            self._permits.acquire(timeout=WITHIN_S)


Leave = Callable[[Running, Running, int], Awaitable[None]]


async def start(sender: Running, receiver: Running, handle: int) -> None:
    ticket, what = ticket_for(sender, f"t{handle}"), request(PROMPT, 30, cache_salt=str(handle))
    await receiver.send(**start_decode(handle, what, ticket))
    await sender.send(**start_prefill(handle, what, ticket))
    await receiver.until(lambda: handle in receiver.admitted)


async def while_queued(sender: Running, receiver: Running, handle: int) -> None:
    steps = Steps(sender)
    await sender.send(**start_prefill(1000 + handle, request([1, 2], 30), ticket_for(sender, f"before-{handle}")))
    await start(sender, receiver, handle)
    assert handle not in sender.progress
    await sender.send(**cancel(handle))
    await receiver.send(**cancel(handle))
    await sender.send(**cancel(1000 + handle))
    steps.open()


async def in_prefill(sender: Running, receiver: Running, handle: int) -> None:
    steps = Steps(sender)
    steps.allow(2)
    await start(sender, receiver, handle)
    await sender.until(lambda: handle in sender.progress)
    await sender.send(**cancel(handle))
    await receiver.send(**cancel(handle))
    steps.open()


async def between(sender: Running, receiver: Running, handle: int) -> None:
    """Computed and published, and the decode node has not heard of it yet."""
    await start(sender, receiver, handle)
    await sender.until(lambda: sender.is_committed(handle))
    await receiver.send(**cancel(handle))
    await sender.send(**cancel(handle))


async def in_transfer(sender: Running, receiver: Running, handle: int) -> None:
    await start(sender, receiver, handle)
    await sender.until(lambda: sender.is_committed(handle))
    await receiver.send(**progress(handle, sender.progress[handle].num_blocks, True))
    for _ in range(handle % 5):  # a different moment each time
        await asyncio.sleep(0)
    await receiver.send(**cancel(handle))
    await sender.send(**cancel(handle))


async def after_token_1(sender: Running, receiver: Running, handle: int) -> None:
    steps = Steps(receiver)
    await start(sender, receiver, handle)
    await sender.until(lambda: sender.is_committed(handle))
    await receiver.send(**progress(handle, sender.progress[handle].num_blocks, True))
    await receiver.until(lambda: handle in receiver.transfers)
    await receiver.send(**continue_decode(handle, sender.outputs[handle]))
    steps.allow(2)
    await receiver.until(lambda: receiver.outputs.get(handle))
    await sender.send(release={"handle": handle})
    await receiver.send(**cancel(handle))
    await receiver.until(lambda: not receiver.node.in_flight)  # or the engine might be done before it
    steps.open()


@pytest.mark.parametrize("connector", ["memory", "tcp", "shared_storage"])
@pytest.mark.parametrize("leave", [while_queued, in_prefill, between, in_transfer, after_token_1])
async def test_all_comes_back(connector: str, leave: Leave, tmp_path: Path) -> None:
    settings = ConnectorSettings(name=connector, path=str(tmp_path), lease_s=1000)  # no lease ends by itself
    async with pair(settings) as (sender, receiver):
        for handle in range(1, TIMES + 1):
            await leave(sender, receiver, handle)
            await sender.until(lambda: sender.is_at_rest)
            await receiver.until(lambda: receiver.is_at_rest)
            assert handle not in receiver.finished
        sender.runner.before_step = receiver.runner.before_step = lambda: None
        assert await run(sender, receiver, 2000, PROMPT, 5) == generate(PROMPT, 5), "and the next one is served"
        await sender.until(lambda: sender.is_at_rest)


async def test_a_late_cancel_stops_a_load_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its admission and its first block, it once went unheard: all blocks were fetched for nobody."""
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    async with prefill(settings) as first:
        await first.send(**start_prefill(1, request(PROMPT, 4), ticket_for(first)))
        await first.until(lambda: first.is_committed(1))
    async with prefill(settings) as node:
        on_admitted = node.node.on_admitted

        def cancelled_at_once(entry: object, *told: object) -> None:
            on_admitted(entry, *told)
            node.node.in_flight.cancel(entry)

        monkeypatch.setattr(node.node, "on_admitted", cancelled_at_once)
        await node.send(**start_prefill(1, request(PROMPT, 4), ticket_for(node, "t2")))
        await node.until(lambda: node.node.engine.stats().num_prefix_queries_tokens > 0)
        await node.until(lambda: node.is_at_rest)
        assert node.node.transfer_metrics.blocks_fetched == 0
        assert node.node.receiver.num_transfers == 0
