"""What a node tells of itself to whoever asks."""

from collections.abc import Collection

from kvasir.common.tokens import pack_tokens
from kvasir.engine.blocks import KVLayout
from kvasir.engine.limits import Limits
from kvasir.proto import common_pb2


def description_to_proto(
    role: "common_pb2.Role.ValueType",
    limits: Limits,
    layout: KVLayout,
    *,
    node_epoch: str,
    version: str,
    model_name: str,
    kv_identity: bytes,
    vocab_size: int,
    eos_token_ids: Collection[int],
    connector: str,
    kv_endpoint: str = "",
    kv_stored_as: str = "",
    metrics_address: str = "",
) -> common_pb2.NodeDescription:
    return common_pb2.NodeDescription(
        role=role,
        node_epoch=node_epoch,
        version=version,
        model_name=model_name,
        kv_identity=kv_identity,
        block_size=limits.block_size,
        kv_cache_dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.total_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=vocab_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        num_total_blocks=limits.num_blocks,
        connector=connector,
        kv_endpoint=kv_endpoint,
        kv_stored_as=kv_stored_as,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        metrics_address=metrics_address,
        eos_token_ids=pack_tokens(sorted(eos_token_ids)),
    )
