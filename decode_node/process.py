from functools import partial

from kvasir.decode_node.config import DecodeConfig
from kvasir.decode_node.node import DecodeNode
from kvasir.kv_connector.base import KVConnector
from kvasir.kv_connector.forms import LOSSY
from kvasir.node.runtime import NodeKind, run_node
from kvasir.proto import decode_pb2, decode_pb2_grpc


def run(config: DecodeConfig) -> int:
    """A decode node, until it is told to stop. The exit status."""
    kind = NodeKind(
        name="decode",
        service=decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name,
        make_node=lambda parts: DecodeNode(parts, config.admission_timeout_s, writes_back=config.kv_write_back),
        add_to_server=decode_pb2_grpc.add_DecodeServiceServicer_to_server,
        check_connector=partial(check_connector, config),
    )
    return run_node(config, kind)


def check_connector(config: DecodeConfig, connector: KVConnector) -> None:
    """What is written back must lie where others look for it, and be exact."""
    if config.kv_write_back and not connector.is_store:
        raise ValueError(f"--kv-write-back needs a store to write to, and {connector.name} is none")
    if config.kv_write_back and config.kv_codec in LOSSY:
        raise ValueError(f"--kv-write-back writes exact blocks, and --kv-codec {config.kv_codec} loses some of them")
