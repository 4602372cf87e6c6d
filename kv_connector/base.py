"""The contract of a KV connector: it moves framed blocks, and knows nothing of what is common to all of them.

A frame is a header (bytes, made and checked by `header.py`) and a payload (a buffer of `bytes_per_block` bytes, or what
a codec made of it). Identity, checksums, leases, waiting for promises, deadlines, retry and metrics live once, in
`sender.py` and `receiver.py`, above every connector.

Two kinds:
    peer    (memory, tcp)             serves blocks out of the sender's own cache; the sender keeps them leased until
                                      the receiver and the transport have let go
    store   (redis, shared_storage)   takes a copy: the sender is free as soon as `put` returns, and anybody may
                                      fetch by content hash later

All methods run on the node's event loop. They raise `KVTransferError` for what may be tried again or done without.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType, Protocol

from kvasir.engine.blocks import BlockId, KVLayout

TransferId = NewType("TransferId", str)
BlockKey = NewType("BlockKey", bytes)  # 32 bytes: a content hash, or `transfer_key(transfer_id, index)`
StoreKey = NewType("StoreKey", str)  # a block key, and what else tells stored blocks apart; only [0-9a-z-]

CODEC_NONE, CODEC_LOSSLESS, CODEC_AUTO = "none", "lossless", "auto"  # auto: one of these two
LOSSY = ("fp16", "int8", "fp8")
CODECS = (CODEC_NONE, CODEC_LOSSLESS, *LOSSY)  # what a header may name
DTYPES = ("float32", "bfloat16", "float16", "int8")
_LOSSY_FORMS = {f"{codec}-{dtype}" for codec in LOSSY for dtype in DTYPES if dtype != "int8"}
STORED_FORMS = frozenset(_LOSSY_FORMS | {f"exact-{dtype}" for dtype in DTYPES})

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
    """Names one attempt to compute a prompt's KV, and says where its blocks will be."""

    transfer_id: TransferId
    connector: str
    endpoints: tuple[Endpoint, ...] = ()
    stored_as: str = ""  # stores: the sender's form, part of its blocks' keys; empty: exact, in the receiver's dtype

    def __post_init__(self) -> None:
        """It may have come over the wire: what it names is remembered, told to others, and connected to."""
        num_bytes = len(self.transfer_id.encode())
        if num_bytes > MAX_TRANSFER_ID_BYTES:
            raise ValueError(f"a transfer's name has at most {MAX_TRANSFER_ID_BYTES} bytes, got {num_bytes}")
        if len(self.endpoints) > MAX_ENDPOINTS:
            raise ValueError(f"a ticket names at most {MAX_ENDPOINTS} endpoints, got {len(self.endpoints)}")
        if self.stored_as and self.stored_as not in STORED_FORMS:
            raise ValueError(f"no block is stored as {self.stored_as!r}")


@dataclass(frozen=True, slots=True)
class KVBlock:
    """One block of a request's KV: to be sent out of this node's cache, or to come into it."""

    index: int  # in the request's block table
    key: BlockKey
    block_id: BlockId
    num_tokens: int


class BlockHeader(NamedTuple):
    """Says what a payload is."""

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


Land = Callable[[StoreKey, Frame], None]  # on any thread


class BlockPacking(Protocol):
    """Lossy codecs where the blocks lie, so that fewer bytes come out of a GPU or go into it. For any thread."""

    def read_packed(self, block_id: BlockId, codec: str, out: memoryview) -> None:
        """Fill `out`: the payload but for its tag. Codec: fp16, int8 or fp8."""
        ...

    def write_packed(self, block_id: BlockId, codec: str, packed: memoryview) -> None:
        """Fill the block, in its own dtype."""
        ...


class BlockMemory(Protocol):
    """A node's KV cache, as bytes. `engine.kv_cache.KVCache` is one."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pool(self) -> memoryview | None:
        """[blocks, bytes of a block], contiguous, of bytes; None where the blocks do not lie in host memory."""
        ...

    def read(self, block_id: BlockId) -> memoryview:
        """The block's bytes, without a copy where the cache is in host memory. Valid while the block is held."""
        ...

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        """Fill the block. `payload` has exactly `layout.bytes_per_block` bytes."""
        ...

    @property
    def packing(self) -> BlockPacking | None:
        """None: whoever reads and writes the blocks packs them."""
        ...


class BlockSource(Protocol):
    """What a peer connector asks the sender's core for, when a receiver wants a block."""

    @property
    def pool(self) -> memoryview | None:
        """`BlockMemory.pool`, for connectors that register memory. A payload may lie elsewhere all the same."""
        ...

    def borrow(self, transfer_id: TransferId, key: BlockKey) -> Frame | None:
        """The block, which stays untouched until `give_back`; None if it is not (or no longer) there."""
        ...

    def give_back(self, transfer_id: TransferId, key: BlockKey) -> None:
        """The transport has let go of the payload. Exactly once for each frame borrowed."""
        ...

    def released(self, transfer_id: TransferId) -> None:
        """The receiver has all that it wants."""
        ...

    def keep_alive(self, transfer_id: TransferId) -> None:
        """The receiver is still at it: the lease begins anew."""
        ...


class PeerConnector(Protocol):
    """From one node's memory to another's."""

    name: str
    is_store: Literal[False]

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        """Bind, start tasks, serve `source`. No payload is ever larger than `max_payload_bytes`."""
        ...

    async def close(self) -> None:
        """Stop. Every borrowed frame has been given back when this returns."""
        ...

    @property
    def endpoint(self) -> str:
        """host:port where receivers fetch from this node, for tickets."""
        ...

    def fetch(self, ticket: Ticket, keys: Sequence[BlockKey]) -> AsyncGenerator[tuple[BlockKey, Frame | None]]:
        """Yield the frames as they land, in any order; None for one that is not there. Ends after the last key.

        A frame's payload is valid until the next one is asked for: the caller copies it to its place. Closing the
        generator early stops the transfer.
        """
        ...

    async def release(self, ticket: Ticket) -> None:
        """Receiver side: nothing more of this ticket is wanted. Best effort."""
        ...

    async def keep_alive(self, ticket: Ticket) -> None:
        """Receiver side: more of this ticket will be wanted. Best effort."""
        ...


class StoreConnector(Protocol):
    """To a place that several nodes share, and from there."""

    name: str
    is_store: Literal[True]

    async def open(self, source: BlockSource, max_payload_bytes: int) -> None:
        """Get ready; a store that is away at the moment is no reason to fail. A store never borrows."""
        ...

    async def close(self) -> None: ...

    @property
    def endpoint(self) -> str:
        """Empty: a store is found by configuration."""
        ...

    async def put(self, frames: Iterable[tuple[StoreKey, Frame]]) -> None:
        """Write the frames; when this returns, they can be fetched by anybody.

        A frame may be made only when it is asked for, on whichever thread that happens: one at a time, and soon
        written, is best. However this ends (return, error, cancellation), nothing reads the payloads afterwards.
        """
        ...

    async def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        """Which of the keys are there now."""
        ...

    def fetch(
        self, keys: Sequence[StoreKey], *, land: Land | None = None
    ) -> AsyncGenerator[tuple[StoreKey, Frame | None]]:
        """As a peer's `fetch`.

        land: a connector that reads on threads may call it there with each frame, before it yields it, and then need
        not keep the payload: so blocks are checked and copied by the thread in whose cache they are. Never after the
        generator has been closed. It may be left alone.
        """
        ...

    async def discard(self, keys: Sequence[StoreKey]) -> None:
        """What is stored there has proved unusable."""
        ...


KVConnector = PeerConnector | StoreConnector  # what a third party implements one of; `is_store` tells them apart
