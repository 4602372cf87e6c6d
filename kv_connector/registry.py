"""Connectors by name. Each is imported only when chosen, so a missing optional library matters only to its users."""

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from kvasir.kv_connector.base import KVConnector
from kvasir.kv_connector.settings import ConnectorSettings

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "kvasir.kv_connectors"

_BUILT_IN = {
    "memory": "kvasir.kv_connector.memory:MemoryConnector",
    "tcp": "kvasir.kv_connector.tcp.connector:TcpConnector",
    "redis": "kvasir.kv_connector.redis.connector:RedisConnector",
    "shared_storage": "kvasir.kv_connector.shared_storage.connector:SharedStorageConnector",
    "nixl": "kvasir.kv_connector.one_sided.nixl:NixlConnector",
    "mooncake": "kvasir.kv_connector.one_sided.mooncake:MooncakeConnector",
}


def connector_names() -> list[str]:
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def open_connector(settings: ConnectorSettings) -> KVConnector:
    """Make the connector that `settings.name` names: a built-in, an installed one, or "module:Class".

    Its class is called with the settings; nothing is opened before `KVSender.start`. Raises ValueError or ImportError
    with one line that says what is wrong, also for whatever a third party's class raises.
    """
    name = settings.name
    if name in _BUILT_IN:
        return _load(_BUILT_IN[name])(settings)
    installed = entry_points(group=ENTRY_POINT_GROUP, name=name)
    parts = EntryPoint.pattern.match(name)
    if not installed and not (parts and parts["attr"]):
        raise ValueError(f"unknown connector {name!r}; choose one of {', '.join(connector_names())}, or module:Class")
    path = next((entry.value for entry in installed), name)
    try:
        connector = _load(path)(settings)
        log.debug("connector %s of %s, a %s", connector.name, path, "store" if connector.is_store else "peer")
        return connector
    except Exception as error:
        log.debug("connector %s cannot be made", path, exc_info=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"connector {path} cannot be made: {reason}") from error


def _load(path: str) -> Callable[[ConnectorSettings], KVConnector]:
    return cast(Callable[[ConnectorSettings], KVConnector], EntryPoint("", path, "").load())
