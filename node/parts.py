from dataclasses import dataclass

from kvasir.engine.engine import Engine
from kvasir.engine.factory import ModelInfo
from kvasir.kv_connector.base import BlockMemory, KVConnector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.node.metrics import NodeMetrics


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """What a node is made of, before it lives."""

    engine: Engine
    memory: BlockMemory
    connector: KVConnector
    connector_settings: ConnectorSettings
    metrics: NodeMetrics
    epoch: str
    model: ModelInfo
