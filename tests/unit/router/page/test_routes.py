import re
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest
from fastapi import FastAPI

from kvasir.common.metrics import Metrics
from kvasir.router.auth import ApiKeys
from kvasir.router.guard import Guard
from kvasir.router.metrics import RouterMetrics
from kvasir.router.overview import OwnOverview
from kvasir.router.page.picture import take_picture
from kvasir.router.page.routes import add_page
from kvasir.router.pool import NodePool
from kvasir.router.recent import Recent
from tests.fake_dispatcher import FakeDispatcher
from tests.unit.router.openai.conftest import LIMITS
from tests.unit.router.test_pool import NO_SESSION, info, load


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    pool, recent = NodePool(), Recent(lambda: 0.0)
    pool.add(info(), NO_SESSION, load(num_free_blocks=40, num_running=2))
    recent.served("chatcmpl-1", "a:1")
    app = FastAPI(redirect_slashes=False)
    metrics = Metrics()
    router_metrics = RouterMetrics(metrics)
    app.add_middleware(Guard, keys=ApiKeys([]), metrics=router_metrics)
    picture = partial(take_picture, pool, recent, lambda: 3)
    overview = OwnOverview(FakeDispatcher(LIMITS, lambda request: []), metrics, router_metrics, picture)
    add_page(app, overview, recent)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        yield client


async def test_all_that_the_page_asks_for_is_there_and_nothing_is_elsewhere(client: httpx.AsyncClient) -> None:
    seen, waiting = set(), {"/"}
    while waiting:
        path = waiting.pop()
        seen.add(path)
        answer = await client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        if "/vendor/" in path:
            continue
        found = re.findall(r"""(?:src|href|from|import)\s*=?\s*["']([^"']+)["']""", answer.text)
        assert all(link.startswith("/page/") for link in found), found
        waiting |= set(found) - seen
    assert len(seen) >= 8


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "../routes.py", "vendor/../../routes.py", "vendor/LICENSES.txt", "%2e%2e/routes.py"]
)
async def test_nothing_else_can_be_read(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/page/{name}")).status_code == 404


async def test_the_cluster_as_json(client: httpx.AsyncClient) -> None:
    cluster = (await client.get("/cluster", params={"answer": "chatcmpl-1"})).json()
    assert cluster["num_waiting"] == 3
    assert cluster["served_by"] == ["a:1"]
    (node,) = cluster["nodes"]
    assert node["num_running"] == 2
    assert len(cluster["latencies"]) == 60
