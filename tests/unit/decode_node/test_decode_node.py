"""A decode node alone with its router: reserving, refusing, continuing, cancelling, deadlines, draining."""

import asyncio
import threading
from dataclasses import replace

import pytest

from kvasir.engine.request import RequestId
from kvasir.engine.step import Sampled, StepPlan
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.proto import common_pb2, decode_pb2
from tests.unit.node.fakes import WITHIN_S, continue_decode, decode, generate, progress, request, start_decode

MEMORY = ConnectorSettings(name="memory")
TICKET = common_pb2.Ticket(transfer_id="t", connector="memory", endpoints=[common_pb2.Endpoint(address="nobody")])


def cancel(handle: int) -> dict[str, common_pb2.CancelRequest]:
    return {"cancel": common_pb2.CancelRequest(handle=handle)}


async def test_without_a_ticket_it_computes_the_prompt_itself() -> None:
    async with decode(MEMORY) as node:
        prompt = list(range(21))
        await node.send(**start_decode(1, request(prompt, 6)))
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        assert node.outputs[1] == generate(prompt, 6)
        assert node.finished[1] == common_pb2.FINISH_REASON_LENGTH
        assert node.node.engine.stats().num_recomputed_tokens == 0, "it was never elsewhere"


async def test_it_says_nothing_before_its_continue() -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, request([1, 2, 3], 4)))
        await node.until(lambda: 1 in node.admitted)
        await asyncio.sleep(0.1)
        assert node.outputs == {}
        await node.send(**continue_decode(1, [7]))
        await node.ends(1)
        assert node.outputs[1] == generate([1, 2, 3, 7], 3)


async def test_a_request_that_moved_here_goes_on_where_it_was() -> None:
    async with decode(MEMORY) as node:
        prompt = list(range(10))
        whole = generate(prompt, 8)
        moved = request(prompt, 8)
        moved.output_token_ids.append(b"".join(token.to_bytes(4, "little") for token in whole[:3]))
        await node.send(**start_decode(1, moved))
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        assert node.outputs[1] == whole[3:]


async def test_a_stop_token_ends_it() -> None:
    async with decode(MEMORY) as node:
        tokens = generate([5, 6], 8)
        await node.send(**start_decode(1, request([5, 6], 8, stop_token_ids=[tokens[2]])))
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        assert node.outputs[1] == tokens[:3]
        assert node.finished[1] == common_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (request([], 4), "empty"),
        (request([997], 4), "vocabulary"),
        (request(list(range(300)), 4), "do not fit"),
        (request([1], 4, num_sequences=129), "at most 128"),
        (request([1], 4, num_sequences=2, output_token_ids=[b"\1\0\0\0"]), "one by one"),
    ],
)
async def test_what_can_never_run_is_refused(what: common_pb2.GenerationRequest, words: str) -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, what))
        await node.ends(1)
        assert node.failed[1].code == common_pb2.FAILURE_CODE_INVALID_REQUEST
        assert words in node.failed[1].message
        await node.send(**start_decode(2, request([1], 2)))
        await node.send(**continue_decode(2, []))
        await node.ends(2)
        assert 2 in node.finished, "the next one is healthy"


async def test_no_seat_is_a_no() -> None:
    async with decode(MEMORY, max_num_seqs=2) as node:
        for handle in (1, 2, 3):
            await node.send(**start_decode(handle, request([handle], 4)))
        await node.ends(3)
        assert node.failed[3].code == common_pb2.FAILURE_CODE_OVERLOADED
        assert set(node.failed) == {3}
        await node.send(**cancel(1))
        await node.until(lambda: node.node.engine.stats().num_loading == 1)
        await node.send(**start_decode(4, request([4], 4)))
        await node.until(lambda: 4 in node.admitted)


async def test_the_last_seats_are_given_to_those_who_come_together() -> None:
    async with decode(MEMORY, max_num_seqs=2) as node:
        for handle in range(1, 101, 2):
            for one in (handle, handle + 1):
                await node.send(**start_decode(one, request([one], 4)))
            await node.until(lambda: {handle, handle + 1} <= set(node.admitted) | set(node.failed))  # noqa: B023
            assert not node.failed
            for one in (handle, handle + 1):
                await node.send(**cancel(one))
            await node.until(lambda: node.node.engine.stats().num_loading == 0)


async def test_no_blocks_is_a_no_and_comes_soon() -> None:
    async with decode(MEMORY, num_blocks=8) as node:
        await node.send(**start_decode(1, request(list(range(24)), 4)))
        await node.until(lambda: 1 in node.admitted)
        await node.send(**start_decode(2, request(list(range(50, 66)), 4)))
        await node.ends(2)
        assert node.failed[2].code == common_pb2.FAILURE_CODE_OVERLOADED


async def test_a_no_also_comes_where_the_numbers_looked_good() -> None:
    """The watermark is the engine's own business: only after it has scheduled is it known that there is no room."""
    async with decode(MEMORY, num_blocks=10, watermark=0.5) as node:
        await node.send(**start_decode(1, request(list(range(16)), 4)))
        await node.until(lambda: 1 in node.admitted)
        await node.send(**start_decode(2, request(list(range(50, 66)), 4)))
        await node.ends(2)
        assert node.failed[2].code == common_pb2.FAILURE_CODE_OVERLOADED
        assert "no room" in node.failed[2].message


async def test_cancel_while_blocks_are_awaited_frees_them() -> None:
    async with decode(MEMORY) as node:
        free = node.num_free_blocks
        await node.send(**start_decode(1, request(list(range(40)), 4), TICKET))
        await node.until(lambda: node.num_free_blocks == free - 10)
        await node.send(**cancel(1))
        await node.until(lambda: node.num_free_blocks == free)
        assert len(node.node.in_flight) == 0


async def test_cancel_while_it_runs_stops_it() -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, request([1], 150)))
        await node.send(**continue_decode(1, []))
        await node.until(lambda: 1 in node.outputs)
        await node.send(**cancel(1))
        await node.until(lambda: node.node.engine.stats().num_running == 0)
        await node.until(lambda: node.num_free_blocks == 64)


async def test_a_deadline_ends_it_wherever_it_is() -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, request(list(range(40)), 4, deadline_s=0.2), TICKET))
        await node.ends(1)
        assert node.failed[1].code == common_pb2.FAILURE_CODE_DEADLINE_EXCEEDED
        await node.until(lambda: node.num_free_blocks == 64)


async def test_a_ticket_for_nobody_is_computed_here() -> None:
    async with decode(MEMORY) as node:
        prompt = list(range(18))
        await node.send(**start_decode(1, request(prompt, 4), TICKET))
        await node.send(**progress(1, 5, True))
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        assert node.outputs[1] == generate(prompt, 4)
        await node.until(lambda: 1 in node.transfers)
        assert node.transfers[1].num_tokens_recomputed == 18


async def test_a_ticket_that_is_none_is_refused() -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, request([1], 4), common_pb2.Ticket(transfer_id="t" * 256)))
        await node.ends(1)
        assert node.failed[1].code == common_pb2.FAILURE_CODE_INVALID_REQUEST
        assert "at most 255 bytes" in node.failed[1].message


async def test_abort_may_come_before_admission() -> None:
    gate = threading.Event()
    async with decode(MEMORY) as node:
        node.runner.before_step = lambda: gate.wait(WITHIN_S)
        await node.send(**start_decode(1, request([1], 4)))
        await node.send(**continue_decode(1, []))
        await node.until(lambda: 1 in node.admitted)
        await node.send(**start_decode(2, request(list(range(9)), 4), TICKET))
        await node.send(abort_transfer=decode_pb2.AbortTransfer(handle=2, reason="lost"))
        await node.send(**continue_decode(2, []))
        gate.set()
        await node.ends(2)
        assert node.outputs[2] == generate(list(range(9)), 4)


async def test_draining_takes_nothing_new_and_lets_the_rest_finish() -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, request([1, 2], 20)))
        await node.until(lambda: 1 in node.admitted)
        answer = await node.stub.Drain(common_pb2.DrainRequest(grace_s=WITHIN_S), timeout=WITHIN_S)
        assert answer.num_in_flight == 1
        await node.send(**start_decode(2, request([1, 2], 20)))
        await node.ends(2)
        assert node.failed[2].code == common_pb2.FAILURE_CODE_DRAINING
        await node.until(lambda: node.heartbeat is not None and node.heartbeat.draining)
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        assert node.outputs[1] == generate([1, 2], 20)
        async with asyncio.timeout(WITHIN_S):
            await node.node.drained()


async def test_one_message_a_step_carries_all_requests() -> None:
    """The router is told per step, not per token: three requests that run together share their events."""
    async with decode(MEMORY) as node:
        sizes: list[int] = []
        node.on_event = lambda event: sizes.append(len(event.step.outputs)) if event.step.outputs else None
        gate = threading.Event()
        node.runner.before_step = lambda: gate.wait(WITHIN_S)
        for handle in (1, 2, 3):
            await node.send(**start_decode(handle, request([handle], 30)))
        for handle in (1, 2, 3):
            await node.send(**continue_decode(handle, []))
        await node.until(lambda: all(session.last_command == 6 for session in node.node.sessions))
        gate.set()
        for handle in (1, 2, 3):
            await node.ends(handle)
            assert node.outputs[handle] == generate([handle], 30)
        assert max(sizes) == 3


async def test_a_numerical_failure_ends_that_request() -> None:
    async with decode(MEMORY) as node:
        execute = node.runner.execute

        def poisoned(plan: StepPlan) -> dict[RequestId, Sampled]:
            return {who: replace(one, is_finite="/1/" not in who[-5:]) for who, one in execute(plan).items()}

        node.runner.execute = poisoned  # type: ignore[method-assign]
        for handle in (1, 2):
            await node.send(**start_decode(handle, request([handle], 4)))
            await node.send(**continue_decode(handle, []))
        for handle in (1, 2):
            await node.ends(handle)
        assert node.failed[1].code == common_pb2.FAILURE_CODE_NUMERICAL
        assert node.outputs[2] == generate([2], 4)
        text = node.node.metrics.metrics.render()[0].decode()
        assert 'kvasir:request_failures_total{error="NumericalError",model_name="fake"} 1.0' in text
        assert 'vllm:request_success_total{finished_reason="length",model_name="fake"} 1.0' in text
