"""What a node is made of, before it lives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.engine.blocks import BlockId
from kvasir.engine.engine import Engine
from kvasir.kv_connector.base import BlockMemory, KVConnector
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.receiver import KVReceiver
from kvasir.kv_connector.sender import KVSender
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.node.metrics import NodeMetrics


@dataclass(frozen=True, kw_only=True)
class NodeParts:
    """What a node is made of."""

    engine: Engine
    memory: BlockMemory
    connector: KVConnector
    connector_settings: ConnectorSettings
    metrics: NodeMetrics
    epoch: str
    kv_identity: bytes
    vocab_size: int

    def make_sender(
        self, release_blocks: Callable[[Sequence[BlockId]], None], transfer_metrics: TransferMetrics
    ) -> KVSender:
        return KVSender(
            self.connector,
            self.memory,
            self.kv_identity,
            self.epoch,
            release_blocks,
            self.connector_settings,
            metrics=transfer_metrics,
        )

    def make_receiver(self, transfer_metrics: TransferMetrics) -> KVReceiver:
        return KVReceiver(
            self.connector, self.memory, self.kv_identity, self.connector_settings, metrics=transfer_metrics
        )
