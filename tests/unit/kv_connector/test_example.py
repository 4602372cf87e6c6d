"""The connector of docs/connectors.md is complete: it passes the suite, and is found by every name that is promised."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from docs.stream_connector import StreamConnector
from kvasir.kv_connector.conformance import connect  # noqa: F401  (a fixture)
from kvasir.kv_connector.conformance.frames import *  # noqa: F403  (tests, all of them)
from kvasir.kv_connector.conformance.transfers import *  # noqa: F403
from kvasir.kv_connector.conformance.wires import *  # noqa: F403
from kvasir.kv_connector.registry import connector_names, open_connector
from kvasir.kv_connector.settings import ConnectorSettings


@pytest.fixture
def settings() -> ConnectorSettings:
    return ConnectorSettings(name=StreamConnector.name, secret="a secret of the tests")


def test_it_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "stream-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: stream\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[kvasir.kv_connectors]\nstream = docs.stream_connector:StreamConnector\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    assert "stream" in connector_names()
    assert isinstance(open_connector(ConnectorSettings(name="stream", secret="s")), StreamConnector)


def test_the_tests_on_the_page_are_the_suite() -> None:
    page = (Path(__file__).parents[3] / "docs" / "connectors.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert {"settings", "connect", *(name for name in globals() if name.startswith("test_a"))} <= names.keys()
