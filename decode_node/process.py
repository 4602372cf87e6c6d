from kvasir.decode_node.config import DecodeConfig
from kvasir.decode_node.node import DecodeNode
from kvasir.decode_node.servicer import DecodeServicer
from kvasir.node.runtime import NodeKind, run_node
from kvasir.proto import decode_pb2, decode_pb2_grpc


def run(config: DecodeConfig) -> int:
    """A decode node, until it is told to stop. The exit status."""
    kind = NodeKind(
        name="decode",
        service=decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
        make_node=lambda parts: DecodeNode(parts, config.admission_timeout_s),
        make_servicer=DecodeServicer,
        add_to_server=decode_pb2_grpc.add_DecodeServiceServicer_to_server,
    )
    return run_node(config, kind)
