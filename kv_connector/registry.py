"""Connectors by name, imported late: a missing optional library hurts nobody who does not use it."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from kvasir.kv_connector.base import KVConnector
from kvasir.kv_connector.settings import ConnectorSettings

ENTRY_POINT_GROUP = "kvasir.kv_connectors"

_BUILT_IN = {
    "memory": "kvasir.kv_connector.memory:MemoryConnector",
    "tcp": "kvasir.kv_connector.tcp:TcpConnector",
    "redis": "kvasir.kv_connector.redis:RedisConnector",
    "shared_storage": "kvasir.kv_connector.shared_storage:SharedStorageConnector",
    "nixl": "kvasir.kv_connector.nixl:NixlConnector",
    "mooncake": "kvasir.kv_connector.mooncake:MooncakeConnector",
}


def connector_names() -> list[str]:
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def open_connector(settings: ConnectorSettings) -> KVConnector:
    """Make the connector that `settings.name` names: ours, an installed one, or "module:Class".

    Its class is called with the settings. It touches the world only when `KVSender.start` opens it.
    """
    name = settings.name
    if name in _BUILT_IN:
        return _load(_BUILT_IN[name])(settings)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return cast(KVConnector, entry.load()(settings))
    if ":" in name:
        return _load(name)(settings)
    raise ValueError(f"unknown connector {name!r}; choose one of {', '.join(connector_names())}, or module:Class")


def _load(path: str) -> Callable[[ConnectorSettings], KVConnector]:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"connector {path} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"there is no connector {attribute!r} in {module}")
    return cast(Callable[[ConnectorSettings], KVConnector], found)
