"""A prefill node alone with its router: first tokens, tickets and who lets go of them, a store that is down."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.proto import common_pb2, prefill_pb2
from tests.unit.node.fakes import WITHIN_S, Running, generate, prefill, request, start_prefill, ticket_for

MEMORY = ConnectorSettings(name="memory")


def store(tmp_path: Path) -> ConnectorSettings:
    return ConnectorSettings(name="shared_storage", path=str(tmp_path / "kv"), store_backoff_s=0.05)


def cancel(handle: int) -> dict[str, common_pb2.CancelRequest]:
    return {"cancel": common_pb2.CancelRequest(handle=handle)}


def release(handle: int) -> dict[str, prefill_pb2.ReleaseTicket]:
    return {"release": prefill_pb2.ReleaseTicket(handle=handle)}


async def start(node: Running, handle: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> None:
    await node.send(**start_prefill(handle, request(prompt, max_tokens, **fields), ticket_for(node, f"t{handle}")))


async def test_it_samples_one_token_and_keeps_the_blocks_until_released() -> None:
    async with prefill(MEMORY) as node:
        prompt = list(range(18))
        await start(node, 1, prompt)
        await node.ends(1)
        assert node.outputs[1] == generate(prompt, 1)
        assert node.finished[1] == common_pb2.FINISH_REASON_HANDED_OFF
        await node.until(lambda: node.is_committed(1))
        assert node.progress[1].num_blocks == 5
        assert node.node.sender.num_leased_blocks == 5
        await node.send(**release(1))
        await node.until(lambda: node.num_free_blocks == 64)
        await node.send(**release(1))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 1}, common_pb2.FINISH_REASON_LENGTH),
        ({"stop_token_ids": generate([1, 2, 3], 1)}, common_pb2.FINISH_REASON_STOP),
    ],
)
async def test_a_first_token_that_ends_it_leaves_nothing_behind(fields: dict[str, int], reason: int) -> None:
    async with prefill(MEMORY) as node:
        await start(node, 1, [1, 2, 3], **fields)  # type: ignore[arg-type]
        await node.ends(1)
        assert node.outputs[1] == generate([1, 2, 3], 1)
        assert node.finished[1] == reason
        await node.until(lambda: node.num_free_blocks == 64)
        await node.until(lambda: node.node.num_busy == 0)


async def test_cancel_acts_between_chunks_and_returns_every_block() -> None:
    async with prefill(MEMORY) as node:
        step = threading.Semaphore(0)
        node.runner.before_step = lambda: step.acquire(timeout=WITHIN_S)
        await start(node, 1, list(range(100)))
        step.release()
        step.release()
        await node.until(lambda: 1 in node.progress)
        await node.send(**cancel(1))
        await node.until(lambda: len(node.node.in_flight) == 0)
        for _ in range(20):
            step.release()
        await node.until(lambda: node.num_free_blocks == 64)
        assert node.node.engine.stats().num_prompt_tokens_computed < 50
        assert 1 not in node.finished


async def test_cancel_after_the_hand_off_lets_go_of_the_blocks() -> None:
    async with prefill(MEMORY) as node:
        await start(node, 1, list(range(18)))
        await node.until(lambda: node.is_committed(1))
        await node.send(**cancel(1))
        await node.until(lambda: node.num_free_blocks == 64)


async def test_blocks_that_nobody_fetches_come_back_when_the_lease_ends() -> None:
    async with prefill(ConnectorSettings(name="memory", lease_s=0.2)) as node:
        await start(node, 1, list(range(18)))
        await node.ends(1)
        await node.until(lambda: node.num_free_blocks == 64)
        await node.until(lambda: node.node.transfer_metrics.leases_expired == 1)


async def test_a_lost_session_cancels_what_is_computed_for_it() -> None:
    async with prefill(MEMORY) as node:
        gate = threading.Event()
        node.runner.before_step = lambda: gate.wait(WITHIN_S)
        await start(node, 1, list(range(100)))
        await node.until(lambda: 1 in node.admitted)
        (session,) = node.node.sessions
        node.node.sessions.end(session)
        gate.set()
        await node.until(lambda: node.num_free_blocks == 64)
        assert node.node.num_busy == 0


async def test_a_lost_session_lets_go_of_what_was_handed_off() -> None:
    async with prefill(MEMORY) as node:
        await start(node, 1, list(range(18)))
        await node.until(lambda: node.is_committed(1))
        assert node.node.sender.num_leased_blocks == 5
        (session,) = node.node.sessions
        node.node.sessions.end(session)
        assert node.node.sender.num_leased_blocks == 0
        await node.until(lambda: node.num_free_blocks == 64)


async def test_a_queue_that_is_full_is_an_answer() -> None:
    async with prefill(MEMORY, max_num_queued_tokens=60, max_num_seqs=2) as node:
        gate = threading.Event()
        node.runner.before_step = lambda: gate.wait(WITHIN_S)
        await start(node, 1, list(range(50)))
        await node.until(lambda: 1 in node.admitted)
        await asyncio.sleep(0)
        gate.set()
        await node.ends(1)
        gate.clear()
        await start(node, 2, list(range(100, 190)))
        await node.until(lambda: 2 in node.admitted)
        assert 2 not in node.failed, "one prompt is always taken"
        gate.set()
        await node.ends(2)


async def test_more_than_the_queue_holds_is_refused_until_there_is_room() -> None:
    async with prefill(MEMORY, max_num_queued_tokens=100) as node:
        step = threading.Semaphore(1)
        node.runner.before_step = lambda: step.acquire(timeout=WITHIN_S)
        await start(node, 1, list(range(80)))
        await node.until(lambda: node.node.engine.stats().num_queued_tokens > 60)
        await start(node, 2, list(range(100, 150)))
        await node.ends(2)
        assert node.failed[2].code == common_pb2.FAILURE_CODE_OVERLOADED
        for _ in range(40):
            step.release()
        await node.ends(1)
        await start(node, 3, list(range(100, 150)))
        await node.ends(3)
        assert 3 in node.finished


async def test_a_ticket_of_another_connector_is_refused() -> None:
    async with prefill(MEMORY) as node:
        ticket = common_pb2.Ticket(transfer_id="t", connector="redis")
        await node.send(**start_prefill(1, request([1, 2]), ticket))
        await node.ends(1)
        assert node.failed[1].code == common_pb2.FAILURE_CODE_INVALID_REQUEST


async def test_a_store_takes_a_copy_and_the_node_is_free_at_once(tmp_path: Path) -> None:
    async with prefill(store(tmp_path)) as node:
        await start(node, 1, list(range(18)))
        await node.ends(1)
        await node.until(lambda: node.is_committed(1))
        await node.until(lambda: node.num_free_blocks == 64)
        assert node.node.transfer_metrics.blocks_stored == 5


async def test_what_a_store_has_is_not_computed_again(tmp_path: Path) -> None:
    prompt = list(range(50))
    async with prefill(store(tmp_path)) as first:
        await start(first, 1, prompt)
        await first.until(lambda: first.is_committed(1))
    async with prefill(store(tmp_path)) as second:
        await start(second, 1, prompt)
        await second.ends(1)
        assert second.outputs[1] == generate(prompt, 1)
        await second.until(lambda: second.is_committed(1))
        assert second.admitted[1].num_fetched_tokens == 48
        assert second.node.engine.stats().num_prompt_tokens_computed == 2, "less than one chunk"
        assert second.progress[1].num_blocks == 13
        await start(second, 2, prompt)
        await second.ends(2)
        assert second.admitted[2].num_cached_tokens == 48
        assert second.node.transfer_metrics.blocks_fetched == 12, "what is cached here is not asked for"


async def test_a_store_that_fails_costs_the_transfer_not_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is stored, the second is not: the token comes, and the commit says how far it got."""
    async with prefill(store(tmp_path)) as node:
        put, num_calls = node.node.parts.connector.put, 0

        async def full_after_one(frames: object) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                raise KVTransferError("no space left")
            await put(frames)

        monkeypatch.setattr(node.node.parts.connector, "put", full_after_one)
        prompt = list(range(30))
        await start(node, 1, prompt)
        await node.ends(1)
        assert node.outputs[1] == generate(prompt, 1)
        assert node.finished[1] == common_pb2.FINISH_REASON_HANDED_OFF
        await node.until(lambda: node.is_committed(1))
        assert node.progress[1].num_blocks == 2
        await node.until(lambda: node.num_free_blocks == 64)


async def test_a_drain_waits_for_the_blocks_that_are_still_to_be_fetched() -> None:
    async with prefill(MEMORY) as node:
        await start(node, 1, list(range(18)))
        await node.until(lambda: node.is_committed(1))
        node.node.drain()
        drained = asyncio.create_task(node.node.drained())
        await asyncio.sleep(0.15)
        assert not drained.done()
        await node.send(**release(1))
        async with asyncio.timeout(WITHIN_S):
            await drained


async def test_a_store_with_a_fault_of_its_own_costs_the_transfer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: without the commit, the decode node would wait for blocks until the deadline."""

    async def broken(frames: object) -> None:
        raise RuntimeError("a bug of the connector")

    async with prefill(store(tmp_path)) as node:
        monkeypatch.setattr(node.node.parts.connector, "put", broken)
        await start(node, 1, list(range(30)))
        await node.ends(1)
        assert node.finished[1] == common_pb2.FINISH_REASON_HANDED_OFF
        await node.until(lambda: node.is_committed(1))
        assert node.progress[1].num_blocks == 0
        await node.until(lambda: node.num_free_blocks == 64)
