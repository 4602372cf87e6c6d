"""How fast a transport takes what it is lent, and what `auto` makes of it."""

import pytest

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockKey
from kvasir.kv_connector.costs import RateMeter
from kvasir.kv_connector.encoder import Encoder
from kvasir.kv_connector.header import unpack
from kvasir.kv_connector.metrics import TransferMetrics
from kvasir.kv_connector.outflow import Outflow
from kvasir.kv_connector.testing import IDENTITY, LARGE, ArrayMemory

BYTES = LARGE.bytes_per_block
KEY = BlockKey(bytes(32))


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.metrics = TransferMetrics()
        self.meter = RateMeter(BYTES, 30.0, lambda: self.now_s)
        self.outflow = Outflow(self.meter, self.metrics, lambda: self.now_s)

    def send(self, num_blocks: int, seconds: float) -> None:
        """All lent at once, given back one by one."""
        for _ in range(num_blocks):
            self.outflow.lent(BYTES)
        for _ in range(num_blocks):
            self.now_s += seconds / num_blocks
            self.outflow.given_back(BYTES)


def test_only_the_time_counts_in_which_it_holds_something() -> None:
    world = World()
    for _ in range(3):
        world.send(10, seconds=0.1)
        world.now_s += 1000  # idle
    assert world.meter.bandwidth_bytes_per_s == pytest.approx(100 * BYTES)
    assert (world.metrics.blocks_sent, world.metrics.bytes_sent) == (30, 30 * BYTES)
    assert world.metrics.send_s == pytest.approx(0.3)
    assert world.outflow.num_lent == 0


def test_a_transport_that_is_never_done_is_measured_too() -> None:
    world = World()
    world.outflow.lent(BYTES)
    for _ in range(200):
        world.outflow.lent(BYTES)
        world.now_s += 0.01
        world.outflow.given_back(BYTES)
    assert world.outflow.num_lent == 1
    assert world.meter.bandwidth_bytes_per_s == pytest.approx(100 * BYTES, rel=0.05)


def test_auto_packs_on_a_slow_way_and_nowhere_else() -> None:
    world = World()
    memory = ArrayMemory(LARGE, 2)
    memory.read(BlockId(0))[:] = bytes(BYTES)  # it packs to next to nothing
    now = iter(range(10**6))
    encoder = Encoder(memory, IDENTITY, "e", "auto", world.meter, lambda: next(now) * 1e-3)

    def codec_now() -> str:
        return unpack(encoder.frame(KEY, BlockId(0), 16).header).codec

    assert encoder.form == "exact-float32"
    assert codec_now() == "none", "nothing is known of the way"
    world.send(10, seconds=10 * BYTES / 2e9)
    assert codec_now() == "none"
    for _ in range(20):
        world.send(10, seconds=10 * BYTES / 1e6)
    assert [codec_now() for _ in range(3)] == ["lossless"] * 3
    for _ in range(40):
        world.send(100, seconds=100 * BYTES / 2e9)
    assert codec_now() == "none"
