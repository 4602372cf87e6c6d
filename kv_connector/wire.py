"""The only file here that knows proto: messages to values and back."""

from kvasir.engine.types import KVLayout
from kvasir.kv_connector.base import Endpoint, Ticket, TransferId
from kvasir.proto import common_pb2, kv_pb2


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


def ticket_to_proto(ticket: Ticket) -> common_pb2.Ticket:
    return common_pb2.Ticket(
        transfer_id=ticket.transfer_id,
        connector=ticket.connector,
        endpoints=[
            common_pb2.Endpoint(address=e.address, first_kv_head=e.first_kv_head, num_kv_heads=e.num_kv_heads)
            for e in ticket.endpoints
        ],
    )


def ticket_from_proto(message: common_pb2.Ticket) -> Ticket:
    return Ticket(
        transfer_id=TransferId(message.transfer_id),
        connector=message.connector,
        endpoints=tuple(Endpoint(e.address, e.first_kv_head, e.num_kv_heads) for e in message.endpoints),
    )
