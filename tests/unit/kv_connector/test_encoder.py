"""What packs blocks, and what it takes itself to be like."""

import threading
import time
from dataclasses import replace

import pytest

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector import codec, encoder, landing
from kvasir.kv_connector.base import BlockKey
from kvasir.kv_connector.codec import encode
from kvasir.kv_connector.costs import CostRule, RateMeter
from kvasir.kv_connector.encoder import CodecSpeed, Encoder, choose_codec
from kvasir.kv_connector.forms import CODEC_LOSSLESS, CODEC_NONE, CODEC_SETTINGS, CODECS
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import SMALL, ArrayMemory, Pair, open_node, random_keys

BLOCK = BlockId(0)
MEGA = 10**6


class SlowAtFirst:
    """A clock, and a codec that takes 1 s when it is first called, and then 1 us."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._next_s = 1.0

    def clock(self) -> float:
        return self.now_s

    def encode(self, codec: str, payload: memoryview, layout: KVLayout) -> memoryview:
        self.now_s += self._next_s
        self._next_s = 1e-6
        return encode(codec, payload, layout)


def test_what_is_loaded_at_first_is_not_taken_for_the_codecs_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, memory = SlowAtFirst(), ArrayMemory(SMALL, 1)
    memory.write(BLOCK, memoryview(bytes(SMALL.bytes_per_block)))
    monkeypatch.setattr(codec, "_loaded", set())
    for module in (codec, encoder):
        monkeypatch.setattr(module, "encode", slow.encode)
    outgoing = RateMeter(SMALL.bytes_per_block, 60.0, slow.clock)
    outgoing.note(1_000_000, 1.0)
    packing = Encoder(memory, bytes(32), "", "auto", outgoing, slow.clock)
    packing.warm_up()
    for _ in range(3):
        assert packing.codec() == CODEC_LOSSLESS, "a slow way is worth it"
        packing.frame(BlockKey(bytes(32)), BLOCK, SMALL.block_size)


@pytest.mark.parametrize("setting", CODEC_SETTINGS)
async def test_a_node_has_loaded_what_it_packs_by_when_it_has_started(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_loaded", set())
    name = CODEC_LOSSLESS if setting == "auto" else setting
    memory = ArrayMemory(SMALL, 1)
    assert codec.is_loaded(name, SMALL, memory) == (name == "none")
    async with open_node(ConnectorSettings(name="memory", codec=setting)):
        assert codec.is_loaded(name, SMALL, memory)
        assert sum(codec.is_loaded(one, SMALL, memory) for one in CODECS) == (1 if name == "none" else 2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("setting", ["none", "lossless", "int8"])
async def test_a_peers_codec_is_loaded_beside_the_event_loop(
    setting: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its first block, which waits for it: for seconds, on a machine's first start. Once it was loaded right
    there, and the node was silent for so long."""
    monkeypatch.setattr(codec, "_loaded", set())
    threads: list[threading.Thread] = []

    def slow_load(name: str, sender: KVLayout, into: KVLayout) -> None:
        threads.append(threading.current_thread())
        time.sleep(2.0)
        codec.load(name, sender, into)

    monkeypatch.setattr(landing, "load", slow_load)
    theirs, keys = replace(SMALL, dtype=dtype), random_keys(8)
    settings = ConnectorSettings(name="memory", costs=CostRule(patience_s=1.2))
    async with (
        open_node(replace(settings, codec=setting), theirs) as sender,
        open_node(settings) as receiver,
    ):
        codec._loaded.clear()  # the sender is another process
        pair = Pair(sender, receiver)
        ticket = pair.ticket()
        await sender.sender.publish(ticket, pair.outgoing(keys))
        transfer = receiver.receiver.start(ticket, pair.wanted(keys), pair.on_block, lambda num_tokens: 0.3)
        transfer.progress(len(keys), committed=True)
        result = await transfer.done()
    needs_nothing = (setting, dtype) == ("none", "float32")
    assert len(threads) == (0 if needs_nothing else 1)
    assert threading.main_thread() not in threads
    assert result.missing == (), "the time that it took is nobody's fault"


@pytest.mark.parametrize(
    ("bandwidth", "lossless", "codec"),
    [
        (None, None, CODEC_NONE),
        (5e9, None, CODEC_NONE),  # nothing packs as fast as that
        (10 * MEGA, None, CODEC_LOSSLESS),  # slow enough to find out
        (10 * MEGA, CodecSpeed(400 * MEGA, 1.5), CODEC_LOSSLESS),
        (10 * MEGA, CodecSpeed(400 * MEGA, 1.0), CODEC_NONE),  # it packs nothing
        (500 * MEGA, CodecSpeed(400 * MEGA, 1.5), CODEC_NONE),
        (10 * MEGA, CodecSpeed(20 * MEGA, 1.5), CODEC_NONE),  # a slow packer
    ],
)
def test_auto_packs_where_that_saves_time(bandwidth: float | None, lossless: CodecSpeed | None, codec: str) -> None:
    assert choose_codec(bandwidth, lossless) == codec
