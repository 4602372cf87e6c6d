"""The conformance suite that third parties run, on every connector that ships."""

import pytest

from kvasir.kv_connector.conformance import *  # noqa: F403  (its tests, and all of them)
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import Connect, pairs_of


@pytest.fixture(params=["memory", "tcp"])
def connect(request: pytest.FixtureRequest) -> Connect:
    return pairs_of(ConnectorSettings(name=request.param, secret="a secret of the tests"))
