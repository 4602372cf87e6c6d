"""What packs blocks, and what it takes itself to be like."""

import pytest

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector import encoder
from kvasir.kv_connector.base import CODEC_LOSSLESS, CODECS, BlockHeader, BlockKey
from kvasir.kv_connector.codec import decode, encode
from kvasir.kv_connector.costs import RateMeter
from kvasir.kv_connector.encoder import Encoder
from kvasir.kv_connector.settings import CODEC_SETTINGS, ConnectorSettings
from kvasir.kv_connector.testing import SMALL, ArrayMemory, open_node

BLOCK = BlockId(0)


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
    monkeypatch.setattr(encoder, "encode", slow.encode)
    outgoing = RateMeter(SMALL.bytes_per_block, 60.0, slow.clock)
    outgoing.note(1_000_000, 1.0)
    packing = Encoder(memory, bytes(32), "", "auto", outgoing, slow.clock)
    packing.warm_up()
    for _ in range(3):
        assert packing.codec() == CODEC_LOSSLESS, "a slow way is worth it"
        packing.frame(BlockKey(bytes(32)), BLOCK, SMALL.block_size)


@pytest.mark.parametrize("setting", CODEC_SETTINGS)
async def test_a_node_has_loaded_what_it_packs_and_unpacks_by_when_it_has_started(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []

    def encoding(codec: str, payload: memoryview, layout: KVLayout) -> memoryview:
        done.append(("encode", codec))
        return encode(codec, payload, layout)

    def decoding(header: BlockHeader, payload: memoryview, into: KVLayout) -> memoryview:
        done.append(("decode", header.codec))
        return decode(header, payload, into)

    monkeypatch.setattr(encoder, "encode", encoding)
    monkeypatch.setattr(encoder, "decode", decoding)
    async with open_node(ConnectorSettings(name="memory", codec=setting)):
        codec = CODEC_LOSSLESS if setting == "auto" else setting
        assert codec in CODECS
        assert done == ([] if codec == "none" else [("encode", codec), ("decode", codec)])
