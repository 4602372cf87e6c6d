"""The conformance suite's part with processes that die or freeze: `make test-connectors`."""

import pytest

from kvasir.kv_connector.conformance.processes import *  # noqa: F403  (tests, all of them)

pytestmark = pytest.mark.full
