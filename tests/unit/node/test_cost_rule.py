"""A node that would wait longer for blocks than it takes to compute them computes them, and remembers."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from kvasir.kv_connector.costs import CostRule
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.node.fakes import (
    Running,
    continue_decode,
    decode,
    generate,
    pair,
    prefill,
    progress,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)

PROMPT = list(range(41))
QUICK = CostRule(always_fetch_s=0.01, patience_s=0.05)


def make_slow(node: Running, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Each block takes so long."""
    connector = node.node.parts.connector
    fetch = connector.fetch

    async def slowly(*arguments: Any) -> AsyncGenerator[Any]:
        async for item in fetch(*arguments):
            await asyncio.sleep(delay_s)
            yield item

    monkeypatch.setattr(connector, "fetch", slowly)


async def hand_over(sender: Running, receiver: Running, handle: int) -> list[int]:
    ticket, what = ticket_for(sender, f"t{handle}"), request(PROMPT, 4, cache_salt=str(handle))
    await receiver.send(**start_decode(handle, what, ticket))
    await sender.send(**start_prefill(handle, what, ticket))
    await sender.until(lambda: sender.is_committed(handle))
    await sender.ends(handle)
    await receiver.send(**progress(handle, sender.progress[handle].num_blocks, True))
    await receiver.send(**continue_decode(handle, sender.outputs[handle]))
    await receiver.ends(handle)
    await receiver.until(lambda: handle in receiver.transfers)
    return sender.outputs[handle] + receiver.outputs[handle]


async def test_a_decode_node_computes_what_comes_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ConnectorSettings(name="memory", costs=QUICK, lease_s=1000)
    async with pair(settings) as (sender, receiver):
        await receiver.send(**start_decode(100, request(PROMPT, 4, cache_salt="rate")))  # it learns how fast it is
        await receiver.send(**continue_decode(100, []))
        await receiver.ends(100)
        make_slow(receiver, monkeypatch, delay_s=1000.0)

        assert await hand_over(sender, receiver, 1) == generate(PROMPT, 4)
        assert receiver.transfers[1].num_tokens_recomputed == len(PROMPT)
        metrics = receiver.node.transfer_metrics
        assert metrics.misses == {MissReason.SLOW: 11}
        await sender.until(lambda: sender.node.sender.num_leased_blocks == 0)  # the ticket was released

        receiver.node.receiver.rates.of(ticket_for(sender).endpoints[0].address).note(1, 5.0)
        fetched = metrics.blocks_fetched
        assert await hand_over(sender, receiver, 2) == generate(PROMPT, 4)
        assert metrics.blocks_fetched == fetched, "nothing is asked of a source known to be slow"

        assert metrics.declined == 2


async def test_a_recovered_path_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ConnectorSettings(name="memory", costs=CostRule(forget_after_s=0.0, patience_s=1000), lease_s=1000)
    async with pair(settings) as (sender, receiver):
        await receiver.send(**start_decode(100, request(PROMPT, 4, cache_salt="rate")))
        await receiver.send(**continue_decode(100, []))
        await receiver.ends(100)
        receiver.node.receiver.rates.of(ticket_for(sender).endpoints[0].address).note(1, 50.0)
        assert await hand_over(sender, receiver, 1) == generate(PROMPT, 4)
        assert receiver.transfers[1].num_blocks_fetched == 11


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_prefill_node_computes_where_its_store_is_slow(is_slow: bool, tmp_path: Path) -> None:
    costs = CostRule(patience_s=1000, forget_after_s=1000)
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path), costs=costs)
    async with prefill(settings) as first, prefill(settings) as node:
        await first.send(**start_prefill(1, request(PROMPT, 4), ticket_for(first)))
        await first.until(lambda: first.is_committed(1))
        await node.send(**start_prefill(1, request([7, 8], 4), ticket_for(node, "t1")))  # it learns how fast it is
        await node.until(lambda: node.is_committed(1))
        if is_slow:
            node.node.receiver.rates.of("shared_storage").note(1, 50.0)
        await node.send(**start_prefill(2, request(PROMPT, 4), ticket_for(node, "t2")))
        await node.until(lambda: node.is_committed(2))
        assert node.outputs[2] == generate(PROMPT, 1)
        assert node.admitted[2].num_fetched_tokens == (0 if is_slow else 40)
        assert node.node.engine.stats().num_prompt_tokens_computed == 2 + (41 if is_slow else 1)
        assert node.node.transfer_metrics.declined == is_slow


async def test_without_a_rate_of_its_own_a_decode_node_waits_for_the_deadline() -> None:
    async with decode(ConnectorSettings(name="memory")) as node:
        assert node.node.loader.compute_s(100) is None
        await node.send(**start_decode(1, request(PROMPT, 8)))
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        cost_s = node.node.loader.compute_s(100)
        assert cost_s is not None
        assert cost_s == pytest.approx(2 * 100 / node.node.engine.stats().prefill_tokens_per_s)
