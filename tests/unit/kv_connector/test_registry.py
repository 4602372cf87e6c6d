import sys

import pytest

from kvasir.kv_connector.memory import MemoryConnector
from kvasir.kv_connector.registry import connector_names, open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp.connector import TcpConnector


def test_connectors_by_name_and_by_path() -> None:
    assert {"memory", "tcp", "redis", "shared_storage"} <= set(connector_names())
    assert isinstance(open_connector(ConnectorSettings(name="memory")), MemoryConnector)
    by_path = ConnectorSettings(name="kvasir.kv_connector.memory:MemoryConnector")
    assert isinstance(open_connector(by_path), MemoryConnector)


@pytest.mark.parametrize("name", ["rdma", "package:", ":Class", "my package:Class"])
def test_an_unknown_name_lists_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown connector '{name}'; choose one of memory, mooncake, nixl, redis, "):
        open_connector(ConnectorSettings(name=name))


def test_a_path_that_leads_nowhere() -> None:
    with pytest.raises(ValueError, match=r"kvasir\.kv_connector\.memory:Nix cannot be made: AttributeError: .* 'Nix'"):
        open_connector(ConnectorSettings(name="kvasir.kv_connector.memory:Nix"))
    with pytest.raises(ValueError, match="no_such_package:Thing cannot be made: ModuleNotFoundError: No module named"):
        open_connector(ConnectorSettings(name="no_such_package:Thing"))
    with pytest.raises(ValueError, match=r"builtins:id cannot be made: AttributeError: 'int' object has no .* 'name'"):
        open_connector(ConnectorSettings(name="builtins:id"))


class Odd:
    def __init__(self, settings: ConnectorSettings) -> None:
        raise KeyError("a colour\nof two lines")


def test_what_a_class_of_somebody_elses_raises_is_a_line_and_the_traceback_is_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    path = f"{__name__}:Odd"
    with pytest.raises(ValueError, match=r"Odd cannot be made: KeyError: 'a colour\\nof two lines'$") as raised:
        open_connector(ConnectorSettings(name=path))
    assert str(raised.value).startswith(f"connector {path} cannot be made")
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert record.exc_info is not None


def test_what_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="needs a path"):
        open_connector(ConnectorSettings(name="shared_storage"))
    with pytest.raises(ValueError, match="needs the cluster's secret"):
        TcpConnector(ConnectorSettings(name="tcp", listen_host="0.0.0.0"))
    with pytest.raises(ValueError, match="lease_s must be positive"):
        ConnectorSettings(lease_s=0)


def test_settings_hide_what_is_secret() -> None:
    shown = repr(ConnectorSettings(secret="hush", redis_url="redis://user:hush@host"))
    assert "hush" not in shown


@pytest.mark.parametrize(
    ("name", "modules", "words"),
    [
        ("nixl", ["nixl", "nixl._api", "nixl_cu12._api", "nixl_cu13._api"], r"pip install '\.\[nixl\]'"),
        (
            "mooncake",
            ["mooncake", "mooncake.engine"],
            r"pip install '\.\[mooncake\]' in .*, and the library libibverbs1",
        ),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(
    name: str, modules: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=words):
        open_connector(ConnectorSettings(name=name))
