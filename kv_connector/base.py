"""The contract of a KV connector: it moves framed blocks from node to node, and does nothing else.

A frame is a header (bytes, made and checked by `header.py`) and a payload (the `bytes_per_block` bytes of a block, or
what a codec made of them). Identity, checksums, leases, waiting for promised blocks, deadlines, retries and metrics are
the same for all connectors, and live above them in `sender.py` and `receiver.py` (the core).

There are two kinds of connector:
    peer    (tcp, nixl, mooncake)     serves blocks out of the sender's own cache; they stay leased until the receiver
                                      and the transport have let go of them
    store   (redis, shared_storage)   takes copies: the sender's blocks are free as soon as `put` returns, and any node
                                      may fetch them later by content hash

All methods run on the node's event loop. They raise `KVTransferError` if something did not work this time; the core
tries again, or computes the blocks.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, Protocol

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector.forms import CODEC_NONE, STORED_FORMS

TransferId = NewType("TransferId", str)
BlockKey = NewType("BlockKey", bytes)  # 32 bytes: a content hash, or `transfer_key(transfer_id, index)`
StoreKey = NewType("StoreKey", str)  # a block key, the block's form and its heads (`stored.store_key`); [0-9a-z-]

MAX_HEADER_BYTES = 4096
MAX_TRANSFER_ID_BYTES = 255
MAX_ENDPOINTS = 256


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a range of KV heads can be fetched."""

    address: str
    first_kv_head: int = 0
    num_kv_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a decode node needs to fetch a prompt's blocks: the name of this attempt, and where the blocks will be."""

    transfer_id: TransferId
    connector: str
    endpoints: tuple[Endpoint, ...] = ()
    stored_as: str = ""  # stores: the sender's form, part of its blocks' keys; empty: exact, in the receiver's dtype

    def __post_init__(self) -> None:
        """Check the bounds: a ticket may come over the wire, and its names are kept, passed on and connected to."""
        num_bytes = len(self.transfer_id.encode())
        if num_bytes > MAX_TRANSFER_ID_BYTES:
            raise ValueError(f"a transfer's name has at most {MAX_TRANSFER_ID_BYTES} bytes, got {num_bytes}")
        if len(self.endpoints) > MAX_ENDPOINTS:
            raise ValueError(f"a ticket names at most {MAX_ENDPOINTS} endpoints, got {len(self.endpoints)}")
        if self.stored_as and self.stored_as not in STORED_FORMS:
            raise ValueError(f"no block is stored as {self.stored_as!r}")


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One block of a request, to be sent out of this node's cache or to be fetched into it."""

    index: int  # in the request's block table
    key: BlockKey
    block_id: BlockId
    num_tokens: int


class BlockHeader(NamedTuple):
    """Describes a payload. A receiver checks every field before it uses the payload."""

    kv_identity: bytes
    layout: KVLayout
    key: BlockKey
    num_tokens: int
    payload_bytes: int
    checksum: int  # of the payload
    sender_epoch: str
    codec: str = CODEC_NONE


class Frame(NamedTuple):
    header: bytes
    payload: memoryview  # of bytes, contiguous


Land = Callable[[StoreKey, Frame], None]  # takes in a frame; callable on any thread


class BlockPacking(Protocol):
    """Lossy codecs that run on the device that holds the blocks, so that fewer bytes cross its bus. For any thread."""

    def read_packed(self, block_id: BlockId, codec: str, out: memoryview) -> None:
        """Fill `out` with the block's payload, without its tag. codec: fp16, int8 or fp8."""
        ...

    def write_packed(self, block_id: BlockId, codec: str, packed: memoryview) -> None:
        """Fill the block from a payload without its tag, converted to the block's own dtype."""
        ...


class BlockMemory(Protocol):
    """A node's KV cache, as bytes. `engine.kv_cache.KVCache` is one."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pool(self) -> memoryview | None:
        """[blocks, bytes of a block] uint8, contiguous; None if the blocks are not in host memory."""
        ...

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes; not a copy if the cache is in host memory. Valid while the block is held."""
        ...

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Fill the block. `payload` has exactly `layout.bytes_per_block` bytes."""
        ...

    @property
    def packing(self) -> BlockPacking | None:
        """None: the codecs run on the host, on what `read` and `write` move."""
        ...


class BlockSource(Protocol):
    """Where a peer connector gets the blocks that receivers ask for. `KVSender` is one."""

    @property
    def pool(self) -> memoryview | None:
        """`BlockMemory.pool`, for connectors that register memory. Payloads may lie elsewhere: packed ones do."""
        ...

    def borrow(self, transfer_id: TransferId, key: BlockKey) -> Frame | None:
        """The block's frame, which does not change until `give_back`; None if it is not, or no longer, there."""
        ...

    def give_back(self, transfer_id: TransferId, key: BlockKey) -> None:
        """The transport has let go of the payload. Call it exactly once for each frame borrowed."""
        ...

    def released(self, transfer_id: TransferId) -> None:
        """The receiver wants nothing more of this transfer."""
        ...

    def keep_alive(self, transfer_id: TransferId) -> None:
        """The receiver still wants the blocks: their lease begins anew."""
        ...


class PeerConnector(Protocol):
    """Moves blocks from one node's memory to another's."""

    name: str
    is_store: Literal[False]

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        """Listen, and serve the blocks of `source`. A payload of more than `max_payload_bytes` is to be refused."""
        ...

    async def close(self) -> None:
        """Stop. Every borrowed frame has been given back when this returns."""
        ...

    @property
    def endpoint(self) -> str:
        """host:port where receivers fetch from this node, for tickets."""
        ...

    def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        """Yield each key with its frame, in the order of arrival; None if the sender does not have the block.

        A payload is valid until the next frame is asked for, by when the caller has copied it. The caller may close the
        generator early, which stops the transfer. Raises KVTransferError.
        """
        ...

    async def release(self, ticket: Ticket) -> None:
        """Receiver side: tell the sender that nothing more of this ticket is wanted. Best effort."""
        ...

    async def keep_alive(self, ticket: Ticket) -> None:
        """Receiver side: tell the sender that more of this ticket will be wanted. Best effort."""
        ...


class StoreConnector(Protocol):
    """Moves blocks to and from a place that several nodes share."""

    name: str
    is_store: Literal[True]

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        """Get ready. Do not fail only because the store cannot be reached now. A store never uses `source`."""
        ...

    async def close(self) -> None: ...

    @property
    def endpoint(self) -> str:
        """Empty: a store is found by configuration."""
        ...

    async def put(self, frames: Iterable[tuple[StoreKey, Frame]]) -> None:
        """Write the frames. When this returns, any node can fetch them.

        `frames` may make each frame only when it is asked for, on the thread that asks. So take one, write it, and then
        take the next. Nothing may read the payloads after this has ended, be it by return, error or cancellation.
        """
        ...

    async def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """For each key, whether it is there now."""
        ...

    def fetch(
        self, keys: Sequence[StoreKey], *, land: Land | None = None
    ) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        """As `PeerConnector.fetch`.

        A connector that reads on threads may call `land` there with each frame, before it yields the frame. Then the
        block is checked and copied by the thread that has just read it, while it is in the CPU's cache, and its payload
        need not be kept. `land` must not be called after the generator has been closed. Using it is optional.
        """
        ...

    async def discard(self, keys: Sequence[StoreKey]) -> None:
        """Remove these blocks: what is stored under their keys has proved unusable."""
        ...


KVConnector = PeerConnector | StoreConnector  # `is_store` tells which
