"""The contract of a KV connector: it moves framed blocks, and knows nothing of what is common to all of them.

A frame is a header (bytes, made and checked by `header.py`) and a payload (a buffer of `bytes_per_block` bytes, or what
a codec made of it). Identity, checksums, codecs, leases, waiting for promises, retry and metrics live once, in
`sender.py` and `receiver.py`, above every connector.

Two kinds: a *peer* connector (`is_store = False`: memory, tcp) serves blocks out of the sender's own cache, so the
sender keeps them leased until the receiver has let go; a *store* (`is_store = True`: redis, shared_storage) takes a
copy, so the sender is free as soon as `put` returns, and anybody may fetch by content hash later.

All methods run on the node's event loop. They raise `KVTransferError` for what may be tried again or done without.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvasir.engine.types import BlockId, KVLayout

TransferId = NewType("TransferId", str)
BlockKey = NewType("BlockKey", bytes)  # 32 bytes: a content hash, or `transfer_key(transfer_id, index)`


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a range of KV heads can be fetched."""

    address: str
    first_kv_head: int = 0
    num_kv_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Names one attempt to compute a prompt's KV, and says where its blocks will be."""

    transfer_id: TransferId
    connector: str
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    header: bytes
    payload: memoryview


class BlockMemory(Protocol):
    """A node's KV cache, as bytes. `engine.kv_cache.KVCache` is one."""

    @property
    def layout(self) -> KVLayout: ...

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, without a copy where the cache is in host memory. Valid while the block is held."""
        ...

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Fill the block. `payload` has exactly `layout.bytes_per_block` bytes."""
        ...


class BlockSource(Protocol):
    """What a peer connector asks the sender's core for, when a receiver wants a block."""

    def borrow(self, transfer_id: TransferId, key: BlockKey) -> Frame | None:
        """The block, which stays untouched until `give_back`; None if it is not (or no longer) there."""
        ...

    def give_back(self, transfer_id: TransferId, key: BlockKey) -> None:
        """The transport has let go of the payload."""
        ...

    def released(self, transfer_id: TransferId) -> None:
        """The receiver has all that it wants."""
        ...

    def keep_alive(self, transfer_id: TransferId) -> None:
        """The receiver is still at it: the lease begins anew."""
        ...


class KVConnector(Protocol):
    """What a third party implements."""

    name: str
    is_store: bool

    async def open(self, source: BlockSource) -> None:
        """Connect, bind, start tasks. Peer connectors serve `source` from now on."""
        ...

    async def close(self) -> None: ...

    @property
    def endpoint(self) -> str:
        """host:port where receivers fetch from this node; empty for a store."""
        ...

    async def put(self, frames: Sequence[tuple[BlockKey, Frame]]) -> None:
        """Stores only: write the frames; when this returns, they can be fetched by anybody."""
        ...

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Stores only: which of the keys are there now."""
        ...

    def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncIterator[tuple[BlockKey, Frame | None]]:
        """Yield the frames as they land, in any order; None for one that is not there. Ends after the last key.

        A frame's payload is valid until the next one is asked for: the caller copies it to its place. Closing the
        iterator early stops the transfer, and nothing is written anywhere after `aclose` has returned.
        """
        ...

    async def release(self, ticket: Ticket) -> None:
        """Receiver side: nothing more of this ticket is wanted. Best effort."""
        ...
