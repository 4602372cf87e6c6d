"""Whole clusters whose KV goes through an engine of others; where it is not installed, the reason."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.asker import Asker, ask

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FETCHED = "kvasir:kv_blocks_fetched_total"
NAMES = ("64-tokens", "513-tokens", "chat-0", "chat-6")


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def cluster(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Cluster]:
    try:
        open_connector(ConnectorSettings(name=request.param))
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    with Cluster(model_dir, request.param) as cluster:
        yield cluster


def answers(cluster: Cluster) -> None:
    """All at once, equal to the reference, and by blocks that have travelled."""
    prompts = [prompt for prompt in reference.prompts(cluster.model_dir) if prompt.name in NAMES]

    async def all_of_them(asker: Asker) -> list[list[int]]:
        bodies = [{"prompt": list(prompt.token_ids), "ignore_eos": prompt.chat is None} for prompt in prompts]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(asker.ids(max_tokens=64, **body)) for body in bodies]
        return [task.result() for task in asked]

    with cluster.deltas(cluster.decode, FETCHED) as rose:
        got = ask(cluster, all_of_them)
    assert got == [list(reference.answers()[prompt.name].token_ids) for prompt in prompts]
    assert rose[FETCHED] > 0


def test_answers_are_the_reference(cluster: Cluster) -> None:
    answers(cluster)


def test_prefill_node_that_comes_back(cluster: Cluster) -> None:
    """Another process, at another address, and what the engine remembers of the first must not matter."""
    cluster.prefill[0].kill()
    cluster.add_node("prefill")
    cluster.wait_ready()
    answers(cluster)
