"""Promises, deadlines and leaving early, against a source that does as it is told."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.common.own_time import OwnTime
from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockHeader, BlockKey, Frame, KVBlock
from kvasir.kv_connector.costs import ComputeCost, CostRule, Rates
from kvasir.kv_connector.header import checksum_of, pack
from kvasir.kv_connector.incoming import IncomingTransfer
from kvasir.kv_connector.landing import ReceiverParts
from kvasir.kv_connector.metrics import MissReason, TransferMetrics
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.sources import LandBlock
from kvasir.kv_connector.testing import IDENTITY, SMALL, ArrayMemory, random_keys, until

KEYS = random_keys(4)
WANTED = [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(KEYS)]


class Source:
    lost = MissReason.PEER_LOST
    has_one_epoch = True
    name = "by script"
    form: str | None = None

    def __init__(self) -> None:
        self.may_deliver = asyncio.Event()
        self.may_deliver.set()
        self.asked: list[list[BlockKey]] = []
        self.num_kept_alive = 0
        self.num_finished = 0
        self.error: Exception | None = None

    async def fetch(self, keys: Sequence[BlockKey], land: LandBlock) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        self.asked.append(list(keys))
        for key in keys:
            await self.may_deliver.wait()
            if self.error is not None:
                raise self.error
            payload = memoryview(key * (SMALL.bytes_per_block // len(key)))
            header = BlockHeader(
                kv_identity=IDENTITY,
                layout=SMALL,
                key=key,
                num_tokens=16,
                payload_bytes=payload.nbytes,
                checksum=checksum_of(payload),
                sender_epoch="e",
            )
            yield key, Frame(pack(header), payload)

    async def keep_alive(self) -> None:
        self.num_kept_alive += 1

    async def finish(self, unusable: Sequence[BlockKey]) -> None:
        self.num_finished += 1

    def timed_out(self) -> None: ...

    def failed(self, error: Exception) -> None: ...


class World:
    def __init__(self, compute_s: ComputeCost = lambda num_tokens: None, **changes: Any) -> None:
        settings = ConnectorSettings(**changes)
        self.memory, self.metrics, self.source = ArrayMemory(SMALL, 8), TransferMetrics(), Source()
        self.landed: list[int] = []
        clock = asyncio.get_running_loop().time
        self.rates = Rates(SMALL.bytes_per_block, settings.costs.forget_after_s, clock)
        self.meter = self.rates.of(self.source.name)
        parts = ReceiverParts(self.memory, IDENTITY, settings, OwnTime(clock), self.metrics, self.rates)
        self.transfer = IncomingTransfer(parts, self.source, WANTED, self.on_block, compute_s)

    def on_block(self, index: int, is_exact: bool) -> None:
        assert is_exact
        self.landed.append(index)


async def test_only_what_is_published_is_asked_for() -> None:
    world = World()
    world.transfer.progress(2)
    await until(lambda: len(world.landed) == 2)
    world.transfer.progress(2)  # nothing new
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == ()
    assert world.source.asked == [KEYS[:2], KEYS[2:]]
    assert world.source.num_finished == 1


async def test_a_promise_has_no_deadline_of_its_own() -> None:
    world = World(fetch_timeout_base_s=2.0, lease_s=0.3)
    await asyncio.sleep(2.1)
    assert world.source.num_kept_alive >= 1
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == ()


async def test_the_deadline_of_a_block_starts_when_it_is_published() -> None:
    world = World(fetch_timeout_base_s=0.2)
    world.source.may_deliver.clear()
    world.transfer.progress(1)
    await asyncio.sleep(0.1)
    world.transfer.progress(4, committed=True)
    async with asyncio.timeout(60):
        assert (await world.transfer.done()).missing == (0, 1, 2, 3)
    assert world.metrics.misses == {MissReason.TIMEOUT: 4}
    assert len(world.source.asked) == 2  # each batch once: what is late is not asked for again


async def test_an_abort_lets_published_blocks_land() -> None:
    world = World()
    world.source.may_deliver.clear()
    world.transfer.progress(2)
    world.transfer.abort("the sender gave up")
    world.source.may_deliver.set()
    assert (await world.transfer.done()).missing == (2, 3)


@pytest.mark.parametrize("num_published", [0, 2, 4])
async def test_cancel_at_any_time_ends_at_once(num_published: int) -> None:
    world = World()
    world.source.may_deliver.clear()
    if num_published:
        world.transfer.progress(num_published)
    for _ in range(num_published):
        await asyncio.sleep(0)
    world.transfer.cancel()
    async with asyncio.timeout(60):
        assert (await world.transfer.done()).missing == (0, 1, 2, 3)
    world.source.may_deliver.set()
    world.transfer.progress(4, committed=True)  # the router did not know yet
    await asyncio.sleep(0.01)
    assert not world.memory.writes
    assert world.source.num_finished == 0  # another node may still want the ticket


async def test_overlap_is_what_was_fetched_before_the_last_block_was_published() -> None:
    world = World()
    world.source.may_deliver.clear()
    world.transfer.progress(2)
    await asyncio.sleep(0.1)
    world.source.may_deliver.set()
    await until(lambda: len(world.landed) == 2)
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    await asyncio.sleep(0.1)
    world.source.may_deliver.set()
    result = await world.transfer.done()
    assert 0.09 < result.overlapped_s <= result.transfer_s - 0.09
    assert world.metrics.overlapped_s == result.overlapped_s


async def test_an_unforeseen_error_ends_in_computing(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.source.error = RuntimeError("a bug")
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == (0, 1, 2, 3)
    assert "unforeseen" in caplog.text


async def test_a_promise_outlives_a_peer_that_cannot_be_told_to_wait() -> None:
    world = World(lease_s=0.03)
    num_tried = 0

    async def unreachable() -> None:
        nonlocal num_tried
        num_tried += 1
        raise KVTransferError("not now")

    world.source.keep_alive = unreachable  # type: ignore[method-assign]
    await until(lambda: num_tried > 1)
    world.transfer.progress(4, committed=True)
    assert (await world.transfer.done()).missing == ()


async def test_a_receiver_that_was_stopped_itself_does_not_blame_its_source() -> None:
    """Whatever came meanwhile is taken in, and the source has the time that it had before, and is as fast."""
    world = World(lambda num_tokens: 0.01, fetch_timeout_base_s=1.5, costs=CostRule(patience_s=1.5))
    world.source.may_deliver.clear()
    world.transfer.progress(4, committed=True)
    await until(lambda: len(world.source.asked) == 1)
    await asyncio.sleep(0.05)
    time.sleep(2.3)  # noqa: ASYNC251  (on purpose)
    await asyncio.sleep(0.05)
    world.source.may_deliver.set()
    assert (await world.transfer.done()).missing == ()
    assert not world.metrics.misses
    assert len(world.source.asked) == 1
    assert world.meter.rate is None or world.meter.rate.latency_s < 1.5
