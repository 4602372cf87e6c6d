"""What every connector must do, as tests that its author runs unchanged:

    from kvasir.kv_connector.conformance import *
    from kvasir.kv_connector.settings import ConnectorSettings

    @pytest.fixture
    def settings():
        return ConnectorSettings(name="my_package.my_module:MyConnector")

They want pytest with pytest-asyncio in auto mode, and take a minute or two. In four parts:

    transfers   two nodes in one process, and nothing goes wrong
    frames      what the connector hands over is dropped, late, cut, damaged, out of order, twice, another's, or of
                another model: the core's checks, and a generator that ends before its time
    wires       the connection itself is cut, frozen, slow, or changes bits
    processes   the process at the other end is killed, or frozen, in the middle of a transfer
"""

import pytest

from kvasir.kv_connector.conformance.frames import *  # noqa: F403
from kvasir.kv_connector.conformance.processes import *  # noqa: F403
from kvasir.kv_connector.conformance.transfers import *  # noqa: F403
from kvasir.kv_connector.conformance.wires import *  # noqa: F403
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import Connect, pairs_of


@pytest.fixture
def connect(settings: ConnectorSettings) -> Connect:
    """Makes pairs of nodes; `settings` comes from whoever runs the suite."""
    return pairs_of(settings)
