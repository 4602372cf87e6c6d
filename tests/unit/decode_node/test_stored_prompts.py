"""A decode node that computes a prompt itself takes what a store has of it first."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.kv_connector.forms import stored_as
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.proto import common_pb2, decode_pb2
from tests.unit.node.fakes import (
    LAYOUT,
    Running,
    continue_decode,
    decode,
    generate,
    prefill,
    progress,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)

PROMPT = list(range(50))  # 12 full blocks, and two tokens


@pytest.fixture
def store(tmp_path: Path) -> ConnectorSettings:
    return ConnectorSettings(name="shared_storage", path=str(tmp_path / "kv"), store_backoff_s=0.05)


async def fill(store: ConnectorSettings, prompt: list[int]) -> None:
    async with prefill(store) as sender:
        await sender.send(**start_prefill(1, request(prompt, 8), ticket_for(sender)))
        await sender.until(lambda: sender.is_committed(1))


def take_away(store: ConnectorSettings) -> None:
    folder = Path(store.path, "blocks")
    folder.rmdir()
    folder.write_text("no folder")


async def run(node: Running, handle: int, what: common_pb2.GenerationRequest) -> list[int]:
    await node.send(**start_decode(handle, what))
    await node.send(**continue_decode(handle, []))
    await node.ends(handle)
    return node.outputs[handle]


async def test_only_what_the_store_lacks_is_computed(store: ConnectorSettings) -> None:
    await fill(store, PROMPT)
    async with decode(store) as node:
        assert await run(node, 1, request(PROMPT, 6)) == generate(PROMPT, 6)
        assert node.node.transfer_metrics.blocks_fetched == 12
        assert node.node.engine.stats().num_prompt_tokens_computed == 2
        await node.until(lambda: 1 in node.transfers)
        assert node.transfers[1].num_blocks_fetched == 12
        longer = PROMPT + [7] * 10
        assert await run(node, 2, request(longer, 6)) == generate(longer, 6)
        assert node.node.transfer_metrics.blocks_fetched == 12, "what is cached here is not asked for"
        assert node.node.engine.stats().num_recomputed_tokens == 0, "what the store lacks was never elsewhere"


async def test_a_store_that_has_nothing_or_is_away_costs_nothing_but_the_question(store: ConnectorSettings) -> None:
    async with decode(store) as node:
        assert await run(node, 1, request(PROMPT, 6)) == generate(PROMPT, 6)
        take_away(store)
        other = PROMPT[::-1]
        assert await run(node, 2, request(other, 6)) == generate(other, 6)
        stats = node.node.engine.stats()
        assert stats.num_prompt_tokens_computed == 100
        assert stats.num_recomputed_tokens == 0


async def test_a_request_that_has_moved_here_finds_its_tokens_too(store: ConnectorSettings) -> None:
    """What another decode node has written back: blocks of the prompt, and of the output so far."""
    whole = generate(PROMPT, 12)
    await fill(store, PROMPT + whole[:8])
    async with decode(store) as node:
        moved = request(PROMPT, 12)
        moved.output_token_ids.append(b"".join(token.to_bytes(4, "little") for token in whole[:8]))
        assert await run(node, 1, moved) == whole[8:]
        assert node.node.transfer_metrics.blocks_fetched == 14


async def test_a_prompt_whose_logprobs_are_wanted_is_computed(store: ConnectorSettings) -> None:
    await fill(store, PROMPT)
    async with decode(store) as node:
        assert await run(node, 1, request(PROMPT, 4, prompt_logprobs=1)) == generate(PROMPT, 4)
        assert node.node.transfer_metrics.blocks_fetched == 0


async def test_cancelled_while_it_is_looked_up_it_gives_its_blocks_back(
    store: ConnectorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, PROMPT)
    async with decode(store) as node:
        lookup = node.node.receiver.lookup

        async def cancelled_meanwhile(*asked: Any) -> int:
            node.node.in_flight.cancel_all_of(next(iter(node.node.sessions)))
            return await lookup(*asked)

        monkeypatch.setattr(node.node.receiver, "lookup", cancelled_meanwhile)
        await node.send(**start_decode(1, request(PROMPT, 6)))
        await node.until(lambda: 1 in node.admitted)
        await node.until(lambda: node.num_free_blocks == 64)
        assert node.node.transfer_metrics.blocks_fetched == 0


@pytest.mark.parametrize("is_lost_before_admission", [True, False])
async def test_what_a_lost_sender_has_promised_may_be_stored_all_the_same(
    store: ConnectorSettings, is_lost_before_admission: bool
) -> None:
    await fill(store, PROMPT[:32])
    async with decode(store) as node:
        ticket = common_pb2.Ticket(transfer_id="t", connector="shared_storage")
        await node.send(**start_decode(1, request(PROMPT, 6), ticket))
        if not is_lost_before_admission:
            await node.until(lambda: 1 in node.admitted)
            await node.send(**progress(1, 3, False))
            await node.until(lambda: node.node.transfer_metrics.blocks_fetched == 3)
        await node.send(abort_transfer=decode_pb2.AbortTransfer(handle=1, reason="lost"))
        await node.send(**continue_decode(1, []))
        await node.ends(1)
        assert node.outputs[1] == generate(PROMPT, 6)
        assert node.node.transfer_metrics.blocks_fetched == 8
        assert node.node.engine.stats().num_recomputed_tokens == 50 - 32


@pytest.mark.parametrize("codec", ["int8", "none"])
async def test_a_lost_sender_s_blocks_are_looked_up_in_the_form_in_which_they_are_fetched(
    store: ConnectorSettings, codec: str
) -> None:
    """They were looked up exact, and then asked for as the sender stores them: all absent. And what was there in the
    sender's form was not seen."""
    await fill(replace(store, codec=codec), PROMPT[:32])
    for sender_codec in ("int8", "none"):
        async with decode(store) as node:
            form = stored_as(sender_codec, LAYOUT)
            ticket = common_pb2.Ticket(transfer_id="t", connector="shared_storage", stored_as=form)
            await node.send(**start_decode(1, request(PROMPT, 6), ticket))
            await node.send(abort_transfer=decode_pb2.AbortTransfer(handle=1, reason="lost"))
            await node.send(**continue_decode(1, []))
            await node.ends(1)
            assert node.node.transfer_metrics.blocks_fetched == (8 if codec == sender_codec else 0)
            assert not node.node.transfer_metrics.misses
