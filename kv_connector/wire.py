"""Protobuf messages to values and back. The only file of this package that knows protobuf."""

from functools import lru_cache

from google.protobuf.message import DecodeError

from kvasir.common.errors import InvalidRequest
from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.base import BlockHeader, BlockKey, Endpoint, Ticket, TransferId
from kvasir.proto import common_pb2, kv_pb2


@lru_cache(maxsize=64)  # shared safely: it is never changed, and messages copy it in
def layout_to_proto(layout: KVLayout) -> kv_pb2.BlockLayout:
    return kv_pb2.BlockLayout(
        num_layers=layout.num_layers,
        first_kv_head=layout.first_kv_head,
        num_kv_heads=layout.num_kv_heads,
        total_kv_heads=layout.total_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )


def layout_from_proto(message: kv_pb2.BlockLayout) -> KVLayout:
    return KVLayout(
        num_layers=message.num_layers,
        first_kv_head=message.first_kv_head,
        num_kv_heads=message.num_kv_heads,
        total_kv_heads=message.total_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
    )


@lru_cache(maxsize=64)  # nearly all blocks that a node receives have the same layout
def _layout_from_bytes(data: bytes) -> KVLayout:
    return layout_from_proto(kv_pb2.BlockLayout.FromString(data))


def header_to_bytes(header: BlockHeader, format_version: int) -> bytes:
    return kv_pb2.BlockHeader(
        format_version=format_version,
        kv_identity=header.kv_identity,
        layout=layout_to_proto(header.layout),
        key=header.key,
        num_tokens=header.num_tokens,
        codec=header.codec,
        payload_bytes=header.payload_bytes,
        checksum=header.checksum,
        sender_epoch=header.sender_epoch,
    ).SerializeToString()


def header_from_bytes(data: bytes, format_version: int) -> BlockHeader:
    """Raises ValueError if the bytes are no header of this version."""
    try:
        message = kv_pb2.BlockHeader.FromString(data)
    except DecodeError as error:
        raise ValueError(f"header does not parse: {error}") from error
    if message.format_version != format_version:
        raise ValueError(f"header format {message.format_version}, wanted {format_version}")
    return BlockHeader(
        kv_identity=message.kv_identity,
        layout=_layout_from_bytes(message.layout.SerializeToString()),
        key=BlockKey(message.key),
        num_tokens=message.num_tokens,
        codec=message.codec,
        payload_bytes=message.payload_bytes,
        checksum=message.checksum,
        sender_epoch=message.sender_epoch,
    )


def ticket_from_proto(message: common_pb2.Ticket) -> Ticket:
    """Raises InvalidRequest if the message is no valid ticket."""
    try:
        return Ticket(
            transfer_id=TransferId(message.transfer_id),
            connector=message.connector,
            endpoints=tuple(Endpoint(e.address, e.first_kv_head, e.num_kv_heads) for e in message.endpoints),
            stored_as=message.stored_as,
        )
    except ValueError as error:
        raise InvalidRequest(f"a ticket of no use: {error}") from error
