"""What a node tells of itself."""

from kvasir.common.tokens import unpack_tokens
from kvasir.engine.blocks import KVLayout
from kvasir.engine.limits import Limits
from kvasir.node.description import description_to_proto
from kvasir.proto import common_pb2


def test_limits_layout_and_ends() -> None:
    description = description_to_proto(
        common_pb2.ROLE_PREFILL,
        Limits(block_size=16, num_blocks=50, max_num_batched_tokens=512, max_num_seqs=8, max_model_len=2048),
        KVLayout(num_layers=2, num_kv_heads=1, total_kv_heads=3, head_dim=64, block_size=16, dtype="float32"),
        node_epoch="e",
        version="1",
        model_name="m",
        kv_identity=b"id",
        vocab_size=100,
        eos_token_ids={2, 0},
        connector="tcp",
    )
    assert (description.num_total_blocks, description.num_kv_heads, description.kv_cache_dtype) == (50, 3, "float32")
    assert unpack_tokens(description.eos_token_ids) == (0, 2)
