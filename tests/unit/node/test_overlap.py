"""Blocks travel while the next chunk is computed: by the order of events, not by the clock."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.node.fakes import (
    BLOCK_SIZE,
    WITHIN_S,
    Running,
    continue_decode,
    generate,
    pair,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)
from tests.unit.node.test_pair import landed, pass_progress_on

CHUNK_BLOCKS = 2  # the fake nodes compute 8 tokens a step
PROMPT = list(range(5 * CHUNK_BLOCKS * BLOCK_SIZE))


class Gate:
    """Holds back what a node asks its connector for."""

    def __init__(self, node: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_pass = asyncio.Event()
        self.may_pass.set()
        self.asked: list[int] = []  # blocks, each time
        self._fetch = node.node.parts.connector.fetch
        monkeypatch.setattr(node.node.parts.connector, "fetch", self.fetch)

    async def fetch(self, *arguments: Any, **options: Any) -> AsyncGenerator[Any]:
        keys: Sequence[Any] = arguments[-1]
        self.asked.append(len(keys))
        await self.may_pass.wait()
        async for item in self._fetch(*arguments, **options):
            yield item


@pytest.mark.parametrize("connector", ["memory", "tcp", "shared_storage"])
async def test_a_chunk_lands_while_the_next_is_computed(
    connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the second token waits for the last chunk's blocks, and for no others."""
    async with pair(ConnectorSettings(name=connector, path=str(tmp_path))) as (sender, receiver):
        gate = Gate(receiver, monkeypatch)
        step = threading.Semaphore(1)
        sender.runner.before_step = lambda: step.acquire(timeout=WITHIN_S)
        what, ticket = request(PROMPT, 4), ticket_for(sender)
        await receiver.send(**start_decode(1, what, ticket))
        await sender.send(**start_prefill(1, what, ticket))
        passing = asyncio.create_task(pass_progress_on(sender, receiver, 1))
        for chunk in range(1, 5):
            await receiver.until(lambda chunk=chunk: landed(receiver) == chunk * CHUNK_BLOCKS)
            assert sender.node.engine.stats().num_prompt_tokens_computed == chunk * CHUNK_BLOCKS * BLOCK_SIZE
            assert sender.outputs == {}, "the next chunk has not been computed"
            if chunk == 4:
                gate.may_pass.clear()
            step.release()
        await sender.ends(1)
        await passing
        await receiver.send(**continue_decode(1, sender.outputs[1]))
        await receiver.until(lambda: sum(gate.asked) == len(PROMPT) // BLOCK_SIZE)
        assert gate.asked[-1] == CHUNK_BLOCKS, "all that is still to come is the last chunk"
        assert receiver.outputs == {}
        gate.may_pass.set()
        await receiver.ends(1)
        assert sender.outputs[1] + receiver.outputs[1] == generate(PROMPT, 4)
        report = receiver.transfers[1]
        assert (report.num_blocks_fetched, report.num_tokens_recomputed) == (len(PROMPT) // BLOCK_SIZE, 0)
        assert 0 < report.overlapped_s < report.transfer_s, "all chunks but the last"
        assert report.num_bytes == report.num_blocks_fetched * BLOCK_SIZE * 8
