"""Several sequences of one prompt through a prefill node and a decode node: one prefill, one transfer."""

import threading
from pathlib import Path

import pytest

from kvasir.common.seeds import sequence_seed
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.proto import common_pb2
from tests.fakes import fake_score
from tests.unit.node.fakes import (
    WITHIN_S,
    Running,
    continue_decode,
    decode,
    generate,
    pair,
    prefill,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)
from tests.unit.node.test_pair import pass_progress_on

MEMORY = ConnectorSettings(name="memory")
HANDED_OFF = common_pb2.FINISH_REASON_HANDED_OFF


def cancel(handle: int, sequence: int) -> dict[str, common_pb2.CancelRequest]:
    return {"cancel": common_pb2.CancelRequest(handle=handle, sequence=sequence)}


def expected(prompt: list[int], sequence: int, num_tokens: int) -> list[int]:
    return generate(prompt, num_tokens, sequence_seed(0, sequence))


async def hand_over(sender: Running, receiver: Running, what: common_pb2.GenerationRequest) -> list[list[int]]:
    """The first tokens, with which the decode node has been told to go on."""
    ticket = ticket_for(sender)
    await receiver.send(**start_decode(1, what, ticket))
    await sender.send(**start_prefill(1, what, ticket))
    await pass_progress_on(sender, receiver, 1)
    await sender.until(lambda: len(sender.reasons) == what.num_sequences)
    first = [sender.outputs_of[1, sequence] for sequence in range(what.num_sequences)]
    await receiver.send(**continue_decode(1, *first))
    return first


@pytest.mark.parametrize("connector", ["memory", "shared_storage"])
@pytest.mark.parametrize("length", [1, 16, 23])
async def test_one_prefill_and_one_transfer_serve_all(connector: str, length: int, tmp_path: Path) -> None:
    path = str(tmp_path) if connector == "shared_storage" else ""
    async with pair(ConnectorSettings(name=connector, path=path)) as (sender, receiver):
        prompt = list(range(100, 100 + length))
        first = await hand_over(sender, receiver, request(prompt, 6, num_sequences=4))
        await receiver.until(lambda: len(receiver.reasons) == 4)
        for sequence in range(4):
            assert first[sequence] + receiver.outputs_of[1, sequence] == expected(prompt, sequence, 6)
        assert sender.node.engine.stats().num_prompt_tokens_computed == length
        assert receiver.node.engine.stats().num_prompt_tokens_computed == 0
        assert receiver.transfers[1].num_blocks_fetched == -(-length // 4)
        assert (len(sender.node.in_flight), len(receiver.node.in_flight)) == (0, 0)


async def test_a_sequence_that_ended_with_its_first_token_is_cancelled_and_the_rest_go_on() -> None:
    prompt = list(range(10))
    for ended in (0, 2):  # the one that leads, and one that follows
        async with pair(MEMORY) as (sender, receiver):
            stop = expected(prompt, ended, 1)
            await hand_over(sender, receiver, request(prompt, 6, num_sequences=3, stop_token_ids=stop))
            assert sender.reasons[1, ended] == common_pb2.FINISH_REASON_STOP
            await receiver.send(**cancel(1, ended))
            others = {0, 1, 2} - {ended}
            assert all(sender.reasons[1, sequence] == HANDED_OFF for sequence in others)
            await receiver.until(lambda others=others: {sequence for _, sequence in receiver.reasons} >= others)
            for sequence in others:
                text = sender.outputs_of[1, sequence] + receiver.outputs_of[1, sequence]
                assert text == expected(prompt, sequence, len(text))
            await receiver.until(lambda: len(receiver.node.in_flight) == 0)


async def test_cancelling_one_by_one_frees_all() -> None:
    async with decode(MEMORY) as node:
        await node.send(**start_decode(1, request(list(range(10)), 150, num_sequences=3)))
        await node.send(**continue_decode(1, []))
        await node.until(lambda: len(node.outputs_of) == 3)
        for sequence in (1, 0, 2):
            await node.send(**cancel(1, sequence))
        await node.until(lambda: node.num_free_blocks == 64)
        assert (len(node.node.in_flight), node.failed) == (0, {})
        await node.send(**cancel(1, 1))


async def test_seats_are_counted_by_sequences() -> None:
    async with decode(MEMORY, max_num_seqs=4) as node:
        gate = threading.Event()
        node.runner.before_step = lambda: gate.wait(WITHIN_S)
        await node.send(**start_decode(1, request([1], 20, num_sequences=3)))
        await node.send(**continue_decode(1, []))
        await node.until(lambda: 1 in node.admitted)
        await node.send(**start_decode(2, request([2], 4, num_sequences=2)))
        await node.ends(2)
        assert node.failed[2].code == common_pb2.FAILURE_CODE_OVERLOADED
        gate.set()
        await node.until(lambda: len(node.reasons) == 3)
        await node.send(**start_decode(3, request([3], 4, num_sequences=9)))
        await node.send(**continue_decode(3, []))
        await node.until(lambda: len(node.reasons) == 12)
        assert node.outputs_of[3, 8] == expected([3], 8, 4), "more than there are seats take turns"


async def test_a_prefill_node_scores_a_prompt_that_it_has_cached() -> None:
    async with prefill(MEMORY) as node:
        prompt = list(range(21))
        await node.send(**start_prefill(1, request(prompt), ticket_for(node, "t1")))
        await node.ends(1)
        await node.send(**start_prefill(2, request(prompt, 0, prompt_logprobs=0), ticket_for(node, "t2")))
        await node.ends(2)
        assert (node.outputs[2], node.finished[2]) == ([], common_pb2.FINISH_REASON_LENGTH)
        positions = [(told.handle, told.first_position, len(told.positions)) for told in node.prompt_logprobs]
        assert positions == [(2, 1, 8), (2, 9, 8), (2, 17, 4)], "as the chunks of the prompt were"
        logprobs = [position.entries[0].logprob for told in node.prompt_logprobs for position in told.positions]
        assert logprobs == [fake_score(prompt, position).entries[0][1] for position in range(1, 21)]
        await node.send(cancel=common_pb2.CancelRequest(handle=1))
        await node.until(lambda: node.num_free_blocks == 64)
