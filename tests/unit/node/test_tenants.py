"""Two tenants with salts of their own never meet: not in a node's cache, not over a connector, not in a store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from tests.unit.node.fakes import BLOCK_SIZE, Running, decode, generate, prefill, request, start_prefill, ticket_for
from tests.unit.node.test_pair import run
from tests.valkey import RedisServer

PROMPT = list(range(4 * BLOCK_SIZE + 1))


async def computed(node: Running, handle: int, salt: str) -> int:
    """How many tokens of the prompt the node had to compute for this tenant."""
    before = node.node.engine.stats().num_prompt_tokens_computed
    await node.send(**start_prefill(handle, request(PROMPT, 4, cache_salt=salt), ticket_for(node, f"t{handle}")))
    await node.until(lambda: node.is_committed(handle))
    await node.ends(handle)
    assert node.outputs[handle] == generate(PROMPT, 1)
    return int(node.node.engine.stats().num_prompt_tokens_computed - before)


async def test_in_the_cache_of_a_prefill_node() -> None:
    async with prefill(ConnectorSettings(name="memory")) as node:
        assert await computed(node, 1, "a") == len(PROMPT)
        assert await computed(node, 2, "b") == len(PROMPT)
        assert await computed(node, 3, "") == len(PROMPT)
        assert [await computed(node, 4 + i, salt) for i, salt in enumerate(("a", "b", ""))] == [1, 1, 1]


@pytest.fixture
def settings(connector: str, tmp_path: Path) -> Iterator[ConnectorSettings]:
    if connector == "redis":
        with RedisServer() as server:
            yield ConnectorSettings(name=connector, redis_url=server.url)
    else:
        yield ConnectorSettings(name=connector, path=str(tmp_path))


@pytest.mark.parametrize("connector", ["redis", "shared_storage"])
async def test_in_a_store(settings: ConnectorSettings) -> None:
    async with prefill(settings) as first:
        assert await computed(first, 1, "a") == len(PROMPT)
    async with prefill(settings) as second:
        assert await computed(second, 1, "b") == len(PROMPT)
        assert second.node.transfer_metrics.blocks_fetched == 0
    async with prefill(settings) as third:
        assert await computed(third, 1, "a") == 1
        assert third.node.transfer_metrics.blocks_fetched == 4


@pytest.mark.parametrize("connector", ["memory", "tcp", "redis", "shared_storage"])
async def test_on_a_decode_node(settings: ConnectorSettings) -> None:
    async with prefill(settings) as sender, decode(settings) as receiver:
        for handle, (salt, num_fetched) in enumerate((("a", 5), ("b", 5), ("a", 1), ("b", 1)), start=1):
            assert await run(sender, receiver, handle, PROMPT, 4, salt) == generate(PROMPT, 4)
            await receiver.until(lambda handle=handle: handle in receiver.transfers)
            assert receiver.transfers[handle].num_blocks_fetched == num_fetched
