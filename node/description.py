"""What a node tells of itself to whoever asks."""

from typing import Any

from kvasir import __version__
from kvasir.common.tokens import pack_tokens
from kvasir.node.node import Node
from kvasir.proto import common_pb2


def description_of(node: Node[Any], metrics_address: str = "") -> common_pb2.NodeDescription:
    """Once it has started."""
    limits, model, connector = node.limits, node.parts.model, node.parts.connector
    return common_pb2.NodeDescription(
        role=node.role,
        node_epoch=node.epoch,
        version=__version__,
        model_name=model.name,
        kv_identity=model.kv_identity,
        block_size=limits.block_size,
        kv_cache_dtype=model.layout.dtype,
        num_layers=model.layout.num_layers,
        num_kv_heads=model.layout.total_kv_heads,
        head_dim=model.layout.head_dim,
        vocab_size=model.vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_total_blocks=limits.num_blocks,
        connector=connector.name,
        kv_endpoint=connector.endpoint,
        kv_stored_as=node.sender.stored_as,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        metrics_address=metrics_address,
        eos_token_ids=pack_tokens(sorted(model.eos_token_ids)),
    )
