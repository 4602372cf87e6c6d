from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.kv_connector.settings import ConnectorSettings
from tests.valkey import RedisServer

CONNECTORS = ("memory", "tcp", "redis", "shared_storage")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Shared by tests that do not harm it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(params=CONNECTORS)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ConnectorSettings:
    """Of each connector that ships."""
    url = request.getfixturevalue("redis_server").url if request.param == "redis" else ""
    return ConnectorSettings(
        name=request.param, secret="a secret of the tests", redis_url=url or "redis://", path=str(tmp_path)
    )
