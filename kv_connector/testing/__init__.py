"""For tests of connectors: block memory without a model, and two nodes that share a connector."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector.base import BlockKey, Endpoint, KVBlock, KVConnector, Ticket, TransferId
from kvasir.kv_connector.incoming import IncomingTransfer
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.receiver import KVReceiver
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.sender import KVSender
from kvasir.kv_connector.settings import ConnectorSettings

SMALL = KVLayout(num_layers=2, num_kv_heads=1, total_kv_heads=1, head_dim=8, block_size=16, dtype="float32")  # 2 KiB
LARGE = replace(SMALL, num_layers=8, num_kv_heads=3, total_kv_heads=3, head_dim=64)  # 192 KiB
IDENTITY = bytes(range(32))
_WITHIN_S = 60.0


class ArrayMemory:
    """Random bytes, so that a block in the wrong place is seen."""

    packing = None

    def __init__(self, layout: KVLayout, num_blocks: int, seed: int = 0) -> None:
        self.layout = layout
        self.writes: Counter[BlockId] = Counter()
        self._bytes = memoryview(bytearray(random.Random(seed).randbytes(num_blocks * layout.bytes_per_block)))

    @property
    def pool(self) -> memoryview:
        size = self.layout.bytes_per_block
        return self._bytes.cast("B", shape=(self._bytes.nbytes // size, size))

    def read(self, block_id: BlockId) -> memoryview:
        size = self.layout.bytes_per_block
        return self._bytes[block_id * size : (block_id + 1) * size]

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        self.writes[block_id] += 1
        self.read(block_id)[:] = payload


@dataclass(eq=False)
class Node:
    connector: KVConnector
    memory: ArrayMemory
    sender: KVSender
    receiver: KVReceiver
    metrics: TransferMetrics
    released: Counter[BlockId]  # how often each block's reference was given back


@asynccontextmanager
async def open_node(
    settings: ConnectorSettings,
    layout: KVLayout = SMALL,
    *,
    seed: int = 0,
    identity: bytes = IDENTITY,
    num_blocks: int = 64,
    connector: KVConnector | None = None,
) -> AsyncIterator[Node]:
    connector = connector or open_connector(settings)
    memory, metrics, released = ArrayMemory(layout, num_blocks, seed), TransferMetrics(), Counter[BlockId]()
    epoch = uuid.uuid4().hex
    sender = KVSender(connector, memory, identity, epoch, released.update, settings, metrics=metrics)
    receiver = KVReceiver(connector, memory, identity, settings, metrics=metrics)
    await sender.start()
    try:
        yield Node(connector, memory, sender, receiver, metrics, released)
    finally:
        await receiver.close()
        await sender.close()


@dataclass(eq=False)
class Pair:
    """A node that computes a prompt, and one that wants its KV. Block i of the prompt is block i of the sender's
    memory, and goes to block `num_blocks - 1 - i` of the receiver's."""

    sender: Node
    receiver: Node
    num_blocks: int = 64
    landed: list[int] = field(default_factory=list)
    at_first_block: Callable[[], None] | None = None  # called once, when a block has landed

    def ticket(self) -> Ticket:
        connector = self.sender.connector
        endpoints = (Endpoint(connector.endpoint),) if connector.endpoint else ()
        return Ticket(transfer_id=TransferId(uuid.uuid4().hex), connector=connector.name, endpoints=endpoints)

    def outgoing(self, keys: Sequence[BlockKey], start: int = 0) -> list[KVBlock]:
        return [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(keys, start)]

    def wanted(self, keys: Sequence[BlockKey]) -> list[KVBlock]:
        return [KVBlock(i, key, self.destination(i), 16) for i, key in enumerate(keys)]

    def destination(self, index: int) -> BlockId:
        return BlockId(self.num_blocks - 1 - index)

    def start(self, ticket: Ticket, keys: Sequence[BlockKey]) -> IncomingTransfer:
        return self.receiver.receiver.start(ticket, self.wanted(keys), self.on_block)

    def on_block(self, index: int, is_exact: bool = True) -> None:
        self.landed.append(index)
        at_first_block, self.at_first_block = self.at_first_block, None
        if at_first_block is not None:
            at_first_block()

    def is_equal(self, index: int) -> bool:
        return self.sender.memory.read(BlockId(index)) == self.receiver.memory.read(self.destination(index))


Connect = Callable[..., AbstractAsyncContextManager[Pair]]


def pairs_of(settings: ConnectorSettings) -> Connect:
    """What the conformance suite wants as its fixture `connect`."""

    @asynccontextmanager
    async def connect(
        layout: KVLayout = SMALL,
        receiver_layout: KVLayout | None = None,
        identity: bytes = IDENTITY,
        num_blocks: int = 64,
        **changes: object,
    ) -> AsyncIterator[Pair]:
        """A fresh pair. `receiver_layout` and `identity` are the receiver's; `changes` go to the settings."""
        changed = replace(settings, **changes)  # type: ignore[arg-type]  # names are checked by replace itself
        own, other = layout, receiver_layout or layout
        async with (
            open_node(changed, own, seed=1, num_blocks=num_blocks) as sender,
            open_node(changed, other, seed=2, identity=identity, num_blocks=num_blocks) as receiver,
        ):
            yield Pair(sender, receiver, num_blocks)

    return connect


def random_keys(num_keys: int) -> list[BlockKey]:
    return [BlockKey(random.SystemRandom().randbytes(32)) for _ in range(num_keys)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not condition():  # noqa: ASYNC110  (anything at all may bring it about)
            await asyncio.sleep(0.002)
