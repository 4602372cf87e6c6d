from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestServer

from tests.unit.bench.scripted_server import ScriptedServer


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    script = ScriptedServer()
    async with TestServer(script.app()) as server:
        script.url = str(server.make_url("")).rstrip("/")
        yield script
