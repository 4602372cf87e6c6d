from kvasir.node.runtime import NodeKind, run_node
from kvasir.prefill_node.config import PrefillConfig
from kvasir.prefill_node.node import PrefillNode
from kvasir.proto import prefill_pb2, prefill_pb2_grpc


def run(config: PrefillConfig) -> int:
    """A prefill node, until it is told to stop. The exit status."""
    kind = NodeKind(
        name="prefill",
        service=prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name,
        make_node=lambda parts: PrefillNode(parts, config.max_num_queued_tokens),
        add_to_server=prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
    )
    return run_node(config, kind)
