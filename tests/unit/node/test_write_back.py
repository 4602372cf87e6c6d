"""What a decode node has filled is found in the store by the next turn, wherever that is computed."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvasir.decode_node.config import DecodeConfig
from kvasir.decode_node.process import check_connector
from kvasir.kv_connector import landing
from kvasir.kv_connector.base import Frame, StoreKey
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.node.fakes import (
    BLOCK_SIZE,
    WITHIN_S,
    Running,
    continue_decode,
    decode,
    generate,
    prefill,
    request,
    start_decode,
    start_prefill,
    ticket_for,
)
from tests.unit.node.test_pair import run


def store(tmp_path: Path, **changes: Any) -> ConnectorSettings:
    return ConnectorSettings(name="shared_storage", path=str(tmp_path / "kv"), **changes)


def has_written(node: Running) -> bool:
    return bool(node.node.write_back.num_waiting == 0 and node.node.sender.num_leased_blocks == 0)


async def local(node: Running, handle: int, prompt: list[int], num_tokens: int) -> list[int]:
    """Prompt and answer by a decode node alone."""
    await node.send(**start_decode(handle, request(prompt, num_tokens)))
    await node.send(**continue_decode(handle, []))
    await node.ends(handle)
    return node.outputs[handle]


async def test_the_next_turn_computes_its_own_tokens_alone_on_another_node(tmp_path: Path) -> None:
    settings = store(tmp_path)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(prefill(settings))
        second = await stack.enter_async_context(prefill(settings))
        decoder = await stack.enter_async_context(decode(settings, writes_back=True))
        prompt = list(range(13))
        answer = await run(first, decoder, 1, prompt, 12)
        await decoder.until(lambda: has_written(decoder))
        num_computed = len(prompt) + 11  # the last token of an answer is never computed
        assert decoder.node.transfer_metrics.blocks_stored == num_computed // BLOCK_SIZE - len(prompt) // BLOCK_SIZE
        assert decoder.node.transfer_metrics.blocks_already_stored == 0, "what came from the store is not offered"

        turn = [*prompt, *answer, 7, 8, 9]
        await second.send(**start_prefill(2, request(turn, 4), ticket_for(second, "t2")))
        await second.ends(2)
        assert second.outputs[2] == generate(turn, 1)
        num_fetched = num_computed // BLOCK_SIZE * BLOCK_SIZE
        await second.until(lambda: 2 in second.admitted)
        assert second.admitted[2].num_fetched_tokens == num_fetched
        assert second.node.engine.stats().num_prompt_tokens_computed == len(turn) - num_fetched
        await second.until(lambda: second.is_committed(2))


async def test_a_node_without_the_option_writes_nothing(tmp_path: Path) -> None:
    async with decode(store(tmp_path)) as node:
        await local(node, 1, list(range(9)), 9)
        assert node.node.transfer_metrics.blocks_stored == 0


async def test_what_is_not_exact_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = store(tmp_path)
    async with prefill(settings) as first, decode(settings, writes_back=True) as decoder:
        monkeypatch.setattr(landing, "is_exact", lambda *_: False)
        prompt = list(range(13))
        assert await run(first, decoder, 1, prompt, 12) == generate(prompt, 12)
        await decoder.until(lambda: has_written(decoder))
        metrics = decoder.node.transfer_metrics
        assert (metrics.blocks_inexact, metrics.blocks_stored, metrics.blocks_already_stored) == (4, 0, 0)
        assert not decoder.node.mirror.hashes, "nor is it in the prefix cache"


async def test_a_store_that_hangs_holds_up_no_token_and_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with decode(store(tmp_path, fetch_timeout_base_s=0.5), writes_back=True) as node:
        hanging, put = asyncio.Event(), node.node.parts.connector.put

        async def hangs(frames: Sequence[tuple[StoreKey, Frame]]) -> None:
            await hanging.wait()
            await put(frames)

        monkeypatch.setattr(node.node.parts.connector, "put", hangs)
        for handle in range(1, 5):
            prompt = [100 * handle + i for i in range(20)]
            assert await local(node, handle, prompt, 20) == generate(prompt, 20)
            assert node.node.write_back.num_waiting <= node.node.limits.num_blocks // 8
        metrics = node.node.transfer_metrics
        assert metrics.blocks_not_stored > 0, "there was no room to wait"
        hanging.set()
        await node.until(lambda: has_written(node))
        await node.until(lambda: node.is_at_rest)


async def test_where_blocks_are_short_none_is_kept_for_writing(tmp_path: Path) -> None:
    async with decode(store(tmp_path), num_blocks=12, writes_back=True) as node:
        prompt = list(range(40))
        assert await local(node, 1, prompt, 8) == generate(prompt, 8)
        await node.until(lambda: has_written(node))
        metrics = node.node.transfer_metrics
        assert metrics.blocks_stored + metrics.blocks_not_stored == (len(prompt) + 7) // BLOCK_SIZE
        assert metrics.blocks_not_stored > 0


async def test_a_drain_waits_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with decode(store(tmp_path), writes_back=True) as node:
        slow, put = asyncio.Event(), node.node.parts.connector.put

        async def slowly(frames: Sequence[tuple[StoreKey, Frame]]) -> None:
            await slow.wait()
            await put(frames)

        monkeypatch.setattr(node.node.parts.connector, "put", slowly)
        await local(node, 1, list(range(9)), 9)
        node.node.drain()
        drained = asyncio.create_task(node.node.drained())
        await asyncio.sleep(0.15)
        assert not drained.done()
        slow.set()
        async with asyncio.timeout(WITHIN_S):
            await drained
        assert node.node.transfer_metrics.blocks_stored == 4


@pytest.mark.parametrize(
    ("connector", "codec", "words"),
    [("memory", "none", "needs a store"), ("shared_storage", "int8", "loses some"), ("shared_storage", "lossless", "")],
)
def test_what_cannot_be_written_back_is_refused_at_start(
    connector: str, codec: str, words: str, tmp_path: Path
) -> None:
    config = DecodeConfig(model=tmp_path, connector=connector, kv_write_back=True, kv_codec=codec)  # type: ignore[arg-type]
    opened = open_connector(ConnectorSettings(name=connector, path=str(tmp_path)))
    if words:
        with pytest.raises(ValueError, match=words):
            check_connector(config, opened)
    else:
        check_connector(config, opened)
