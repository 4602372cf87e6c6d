from kvasir.node.servicer import NodeServicer
from kvasir.proto import prefill_pb2_grpc


class PrefillServicer(NodeServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Each of the generated methods is `NodeServicer`'s."""
