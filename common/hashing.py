"""The hash chain that names KV blocks by what they depend on.

A full block's hash covers the hash of the block before it and the block's own tokens; the chain's root covers the
KV identity (weights, config, block size) and the cache salt. Equal hashes on any two nodes mean equal KV.
SHA-256, since across tenants a collision would be a leak.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NewType

from kvasir.common.tokens import TOKEN_BYTES, pack_tokens

_ROUTING_BYTES = 8

BlockHash = NewType("BlockHash", bytes)


def root_hash(kv_identity: bytes, cache_salt: str = "") -> BlockHash:
    """What a prompt's first block chains to."""
    salt = cache_salt.encode()
    return BlockHash(sha256(b"kvasir-root" + kv_identity + len(salt).to_bytes(4, "little") + salt).digest())


def block_hashes(
    root: BlockHash, token_ids: Sequence[int], block_size: int, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`; `known` are the first of them, computed earlier."""
    parent = known[-1] if known else root
    return [*known, *hash_chain(parent, token_ids[len(known) * block_size :], block_size)]


def hash_chain(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> Iterator[BlockHash]:
    """The same one by one, so that nobody need compute more of them than are looked at."""
    packed = pack_tokens(token_ids)
    block_bytes = block_size * TOKEN_BYTES
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        parent = BlockHash(sha256(parent + packed[start : start + block_bytes]).digest())
        yield parent


def routing_key(block_hash: BlockHash) -> int:
    """The first 8 bytes: enough to guess by where a block is, and not to be told by that it is the same."""
    return int.from_bytes(block_hash[:_ROUTING_BYTES], "little")


def transfer_key(transfer_id: str, index: int) -> bytes:
    """The key of a block that has no content hash: the last, partial one of a prompt."""
    return sha256(f"kvasir-transfer:{transfer_id}:{index}".encode()).digest()
