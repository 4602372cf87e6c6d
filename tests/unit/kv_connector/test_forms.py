"""Blocks of one content in several forms: packed, of another dtype, exact or not; and nothing under a wrong name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.engine.kv_cache import cache_shape
from kvasir.kernels.kv_rows import read_rows
from kvasir.kv_connector.base import BlockKey, Endpoint, KVBlock, Ticket, TransferId
from kvasir.kv_connector.header import unpack
from kvasir.kv_connector.incoming import TransferResult
from kvasir.kv_connector.metrics import MissReason
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, Node, open_node, random_keys
from tests.unit.kernels.paged import in_dtype

NUM_BLOCKS = 6
BF16 = replace(LARGE, dtype="bfloat16")
INT8 = replace(LARGE, dtype="int8")
EXACT = ("none", "lossless", "auto")
LOSSY = {"fp16": 0.002, "int8": 0.05, "fp8": 0.25}  # the largest error in values up to 4


def values_of(node: Node, index: int) -> torch.Tensor:
    layout = node.memory.layout
    block = torch.frombuffer(bytearray(node.memory.read(BlockId(index))), dtype=getattr(torch, layout.dtype))
    return read_rows(block.view(cache_shape(layout, 1)), torch.float32)


def fill(node: Node) -> None:
    """Values as a model has them, so that half precision is near them."""
    layout = node.memory.layout
    for index in range(NUM_BLOCKS):
        values = np.random.default_rng(index).normal(size=cache_shape(replace(layout, dtype="float32"), 1))
        block = in_dtype(torch.tensor(values).float(), getattr(torch, layout.dtype))
        node.memory.read(BlockId(index))[:] = block.view(-1).view(torch.uint8).numpy().tobytes()


@dataclass(eq=False)
class Way:
    """From one node to another, which may keep its cache in another dtype."""

    sender: Node
    receiver: Node
    keys: list[BlockKey] = field(default_factory=lambda: random_keys(NUM_BLOCKS))
    exact: dict[int, bool] = field(default_factory=dict)

    async def publish(self) -> Ticket:
        connector = self.sender.connector
        ticket = Ticket(
            transfer_id=TransferId("t"),
            connector=connector.name,
            endpoints=(Endpoint(connector.endpoint),) if connector.endpoint else (),
            stored_as=self.sender.sender.stored_as,
        )
        blocks = [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(self.keys)]
        await self.sender.sender.publish(ticket, blocks)
        self.sender.sender.commit(ticket.transfer_id)
        return ticket

    async def fetch(self, ticket: Ticket) -> TransferResult:
        wanted = [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(self.keys)]
        transfer = self.receiver.receiver.start(ticket, wanted, self.exact.__setitem__)
        transfer.progress(NUM_BLOCKS, committed=True)
        return await transfer.done()

    def error(self) -> float:
        """The largest difference between what was sent and what is there now."""
        pairs = ((values_of(self.sender, i), values_of(self.receiver, i)) for i in range(NUM_BLOCKS))
        return max(float((sent - landed).abs().max()) for sent, landed in pairs)


@asynccontextmanager
async def way(
    settings: ConnectorSettings, layout: KVLayout = LARGE, into: KVLayout = LARGE, **changes: str
) -> AsyncIterator[Way]:
    sending = replace(settings, **changes)  # type: ignore[arg-type]
    async with (
        asyncio.timeout(60),
        open_node(sending, layout, seed=1, num_blocks=NUM_BLOCKS) as sender,
        open_node(settings, into, seed=2, num_blocks=NUM_BLOCKS) as receiver,
    ):
        fill(sender)
        yield Way(sender, receiver)


@pytest.fixture(params=["memory", "shared_storage"])
def own_settings(request: pytest.FixtureRequest, tmp_path: Path) -> ConnectorSettings:
    return ConnectorSettings(name=request.param, path=str(tmp_path))


@pytest.mark.parametrize("codec", EXACT)
async def test_exact_codecs_change_nothing(own_settings: ConnectorSettings, codec: str) -> None:
    async with way(own_settings, codec=codec) as one:
        assert (await one.fetch(await one.publish())).missing == ()
        assert one.error() == 0
        assert one.exact == dict.fromkeys(range(NUM_BLOCKS), True)
        assert one.receiver.metrics.blocks_inexact == 0


@pytest.mark.parametrize("codec", LOSSY)
async def test_lossy_codecs_are_near_smaller_and_said_to_be_lossy(own_settings: ConnectorSettings, codec: str) -> None:
    async with way(own_settings, codec=codec) as one:
        result = await one.fetch(await one.publish())
        assert result.missing == ()
        assert 0 < one.error() < LOSSY[codec]
        assert result.num_bytes < 0.6 * NUM_BLOCKS * LARGE.bytes_per_block
        assert one.exact == dict.fromkeys(range(NUM_BLOCKS), False)
        assert one.receiver.metrics.blocks_inexact == NUM_BLOCKS


@pytest.mark.parametrize(("layout", "into"), [(LARGE, BF16), (BF16, LARGE), (LARGE, INT8), (INT8, LARGE)])
@pytest.mark.parametrize("codec", ["none", "lossless"])
async def test_nodes_of_two_dtypes_understand_each_other(
    own_settings: ConnectorSettings, layout: KVLayout, into: KVLayout, codec: str
) -> None:
    async with way(own_settings, layout, into, codec=codec) as one:
        assert (await one.fetch(await one.publish())).missing == ()
        assert one.error() <= (0.03 if into in (BF16, INT8) else 0)
        assert set(one.exact.values()) == {False}, "it is not what this node would have computed"
        assert not one.receiver.metrics.misses


@pytest.mark.parametrize("codec", ["none", "lossless", *LOSSY])
async def test_nodes_that_keep_int8_exchange_it_as_it_is(own_settings: ConnectorSettings, codec: str) -> None:
    """Whatever codec is set: such blocks are small already, and exact between the two."""
    async with way(own_settings, INT8, INT8, codec=codec) as one:
        result = await one.fetch(await one.publish())
        assert result.missing == ()
        assert one.error() == 0
        assert set(one.exact.values()) == {True}
        assert result.num_bytes < 0.27 * NUM_BLOCKS * LARGE.bytes_per_block


async def test_packed_copies_are_bounded_however_many_are_lent() -> None:
    """Beyond the bound blocks go as they are, out of the cache itself."""
    async with way(ConnectorSettings(name="memory"), codec="lossless") as one:
        await one.publish()
        sender, transfer_id = one.sender.sender, TransferId("t")
        num_packed = 0
        while unpack((frame := sender.borrow(transfer_id, one.keys[0])).header).codec == "lossless":  # type: ignore[union-attr]
            num_packed += 1
            assert num_packed * frame.payload.nbytes < 65 * LARGE.bytes_per_block  # type: ignore[union-attr]
        for _ in range(num_packed + 1):
            sender.give_back(transfer_id, one.keys[0])
        assert sender.num_borrowed_blocks == 0
        frame = sender.borrow(transfer_id, one.keys[1])
        assert frame is not None
        assert unpack(frame.header).codec == "lossless", "there is room again"
        sender.give_back(transfer_id, one.keys[1])


async def test_a_lookup_finds_what_is_exact_for_this_node_alone(tmp_path: Path) -> None:
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    for codec, layout, num_found in (
        ("lossless", LARGE, NUM_BLOCKS), ("int8", LARGE, 0), ("fp8", LARGE, 0), ("none", BF16, 0)
    ):  # fmt: skip
        async with way(settings, layout, codec=codec) as one:
            await one.publish()
            assert await one.receiver.receiver.lookup(one.keys) == num_found, codec


async def test_two_forms_of_one_content_lie_beside_each_other(tmp_path: Path) -> None:
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    keys = random_keys(NUM_BLOCKS)
    for codec, is_exact, num_new in (("int8", False, 6), ("none", True, 6), ("lossless", True, 0), ("int8", False, 0)):
        async with way(settings, codec=codec) as one:
            one.keys = keys
            assert (await one.fetch(await one.publish())).missing == ()
            assert set(one.exact.values()) == {is_exact}
            assert (one.sender.metrics.blocks_stored, one.sender.metrics.blocks_already_stored) == (
                num_new,
                6 - num_new,
            )


def misname(folder: Path, form: str, other: str) -> int:
    files = list(folder.rglob(f"*-{form}-*"))
    for file in files:
        file.rename(file.with_name(file.name.replace(form, other)))
    return len(files)


@pytest.mark.parametrize(("codec", "layout"), [("int8", LARGE), ("fp8", LARGE), ("fp16", LARGE), ("none", BF16)])
async def test_what_lies_under_a_wrong_name_is_a_miss(tmp_path: Path, codec: str, layout: KVLayout) -> None:
    """A lossy block, or one of another dtype, that somebody has put where exact ones lie."""
    settings = ConnectorSettings(name="shared_storage", path=str(tmp_path))
    async with way(settings, layout, codec=codec) as one:
        await one.publish()
        assert misname(tmp_path, one.sender.sender.stored_as, "exact-float32") == NUM_BLOCKS
        ticket = Ticket(transfer_id=TransferId("u"), connector="shared_storage", stored_as="exact-float32")
        result = await one.fetch(ticket)
        assert len(result.missing) == NUM_BLOCKS
        assert one.receiver.metrics.misses == {MissReason.CODEC: 2 * NUM_BLOCKS}, "each was read twice"
        assert not one.receiver.memory.writes
        assert await one.receiver.receiver.lookup(one.keys) == 0, "and thrown out"


def test_a_ticket_may_not_name_files() -> None:
    for form in ("../../etc", "exact-float64", "zip-float32"):
        with pytest.raises(ValueError, match="no block is stored as"):
            Ticket(transfer_id=TransferId("t"), connector="shared_storage", stored_as=form)
