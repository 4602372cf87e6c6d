"""Under which names a ticket's blocks are asked for."""

from kvasir.common.hashing import block_hashes, root_hash, transfer_key
from kvasir.engine.step import Admitted
from kvasir.kv_connector.base import BlockKey, KVBlock, Ticket


def wanted_blocks(ticket: Ticket, admitted: Admitted, kv_identity: bytes, block_size: int) -> list[KVBlock]:
    """Full blocks go by their content; the last, partial one by the ticket."""
    request = admitted.request
    token_ids = request.token_ids[: request.num_tokens_at_arrival]
    hashes = block_hashes(root_hash(kv_identity, request.cache_salt), token_ids, block_size)
    wanted = []
    for index in admitted.missing:
        key = hashes[index] if index < len(hashes) else transfer_key(ticket.transfer_id, index)
        num_tokens = min(block_size, len(token_ids) - index * block_size)
        wanted.append(KVBlock(index, BlockKey(key), admitted.block_table[index], num_tokens))
    return wanted
