"""The hash chain that names KV blocks by what they depend on.

A full block's hash covers the hash of the block before it and the block's own tokens; the chain's root covers the
KV identity (weights, config, block size) and the cache salt. Equal hashes on any two nodes mean equal KV.
SHA-256, since across tenants a collision would be a leak.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import NewType

import numpy as np

BlockHash = NewType("BlockHash", bytes)


def root_hash(kv_identity: bytes, cache_salt: str = "") -> BlockHash:
    """What a prompt's first block chains to."""
    salt = cache_salt.encode()
    return BlockHash(sha256(b"kvasir-root" + kv_identity + len(salt).to_bytes(4, "little") + salt).digest())


def block_hashes(
    root: BlockHash, token_ids: Sequence[int], block_size: int, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`; `known` are the first of them, computed earlier."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    tokens = np.asarray(token_ids[len(hashes) * block_size :], dtype="<u4")
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = BlockHash(sha256(parent + tokens[start : start + block_size].tobytes()).digest())
        hashes.append(parent)
    return hashes


def transfer_key(transfer_id: str, index: int) -> bytes:
    """The key of a block that has no content hash: the last, partial one of a prompt."""
    return sha256(f"kvasir-transfer:{transfer_id}:{index}".encode()).digest()
