"""The conformance suite on the connectors that want an engine of others; where none is installed, the reason."""

import pytest

from kvasir.kv_connector.conformance import *  # noqa: F403  (its tests, all of them)
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings

_missing: dict[str, str] = {}
for _name in ("nixl", "mooncake"):
    try:
        open_connector(ConnectorSettings(name=_name))
    except ModuleNotFoundError as error:
        _missing[_name] = str(error)
if len(_missing) == 2:
    pytest.skip("; ".join(_missing.values()), allow_module_level=True)


@pytest.fixture(params=["nixl", "mooncake"])
def settings(request: pytest.FixtureRequest) -> ConnectorSettings:
    if request.param in _missing:
        pytest.skip(_missing[request.param])
    return ConnectorSettings(name=request.param, secret="a secret of the tests")
