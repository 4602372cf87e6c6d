"""What a prefill node takes: as much as it can compute, and hold for those who will fetch it."""

import asyncio
from dataclasses import replace

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.prefill_node.admission import Holdings, refusal
from kvasir.proto import common_pb2, prefill_pb2
from tests.unit.node.fakes import prefill, request, start_prefill, ticket_for

IDLE = Holdings(
    num_queued_tokens=0, num_newcomer_blocks=0, num_leased_blocks=0, num_free_blocks=100, num_total_blocks=100
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"num_queued_tokens": 90}, "wait here"),
        ({"num_leased_blocks": 60, "num_free_blocks": 10}, ""),  # there is room all the same
        ({"num_leased_blocks": 60, "num_free_blocks": 9}, "held for other nodes"),
        ({"num_leased_blocks": 60, "num_free_blocks": 15, "num_newcomer_blocks": 6}, "held for other nodes"),
        ({"num_leased_blocks": 50, "num_free_blocks": 9}, ""),  # prompts that end here will make room
    ],
)
def test_a_prompt_of_10_blocks(changes: dict[str, int], words: str) -> None:
    why_not = refusal(replace(IDLE, **changes), num_tokens=20, num_blocks=10, max_num_queued_tokens=100)
    assert (words in why_not) if words else why_not == ""


def test_one_prompt_is_taken_however_long() -> None:
    assert refusal(IDLE, num_tokens=10**6, num_blocks=10**5, max_num_queued_tokens=100) == ""


async def test_blocks_that_nobody_fetches_turn_prompts_away_until_they_are_let_go() -> None:
    """Once they pinned the cache, and everything waited behind them."""
    async with prefill(ConnectorSettings(name="memory", lease_s=1000), num_blocks=20, max_num_seqs=2) as node:
        for handle in (1, 2):
            prompt = [100 * handle + i for i in range(24)]
            await node.send(**start_prefill(handle, request(prompt), ticket_for(node, f"t{handle}")))
            await node.until(lambda handle=handle: node.is_committed(handle))
        assert node.node.sender.num_leased_blocks == 12
        await node.send(**start_prefill(3, request(list(range(40))), ticket_for(node, "t3")))
        await node.ends(3)
        assert node.failed[3].code == common_pb2.FAILURE_CODE_OVERLOADED
        assert "12 of 20 blocks are held for other nodes" in node.failed[3].message
        await node.send(**start_prefill(4, request(list(range(20))), ticket_for(node, "t4")))
        await node.ends(4)
        assert 4 in node.finished, "a smaller one finds room"
        for handle in (1, 2, 4):
            await node.send(release=prefill_pb2.ReleaseTicket(handle=handle))
        await node.until(lambda: node.is_at_rest)
        await node.send(**start_prefill(5, request(list(range(40))), ticket_for(node, "t5")))
        await node.ends(5)
        assert 5 in node.finished
        await node.send(release=prefill_pb2.ReleaseTicket(handle=5))


async def test_what_is_handed_off_can_be_let_go_for_as_long_as_it_is_here() -> None:
    """Fetched slowly, blocks outlive the lease many times over; the release must still find them."""
    async with prefill(ConnectorSettings(name="memory", lease_s=0.1)) as node:
        now_s = 0.0
        node.node.sender._leases._clock = lambda: now_s
        await node.send(**start_prefill(1, request(list(range(20))), ticket_for(node, "t1")))
        await node.until(lambda: node.is_committed(1))
        for _ in range(20):
            node.node.sender.keep_alive("t1")
            now_s += 0.09
            await asyncio.sleep(0.03)  # it is looked for leases that are over
        assert node.node.sender.num_leases == 1
        await node.send(release=prefill_pb2.ReleaseTicket(handle=1))
        await node.until(lambda: node.is_at_rest)
        assert node.node.transfer_metrics.leases_expired == 0
