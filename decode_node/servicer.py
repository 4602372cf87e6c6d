from kvasir.node.servicer import NodeServicer
from kvasir.proto import decode_pb2_grpc


class DecodeServicer(NodeServicer, decode_pb2_grpc.DecodeServiceServicer):
    """Each of the generated methods is `NodeServicer`'s."""
