"""The conformance suite that third parties run, on every connector that ships."""

import pytest

from kvasir.kv_connector.conformance import *  # noqa: F403  (its tests, all of them)
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import Connect, pairs_of


@pytest.fixture
def connect(settings: ConnectorSettings) -> Connect:
    return pairs_of(settings)
