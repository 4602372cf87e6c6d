"""Makes frames of a node's blocks: packed by the codec that was asked for, or by what pays."""

import time
from collections.abc import Callable

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import (
    CODEC_AUTO,
    CODEC_LOSSLESS,
    CODEC_NONE,
    BlockHeader,
    BlockKey,
    BlockMemory,
    Frame,
)
from kvasir.kv_connector.codec import codec_for, encode, encode_from, is_loaded, load, stored_as
from kvasir.kv_connector.costs import CodecSpeed, RateMeter, choose_codec
from kvasir.kv_connector.header import checksum_of, pack


class Encoder:
    """`outgoing` is what the way out was measured to give, in bytes as they travel."""

    def __init__(
        self,
        memory: BlockMemory,
        kv_identity: bytes,
        epoch: str,
        codec: str,
        outgoing: RateMeter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._memory = memory
        self._kv_identity = kv_identity
        self._epoch = epoch
        self._setting = codec_for(codec, memory.layout)
        self.outgoing = outgoing
        self._clock = clock
        self._lossless: CodecSpeed | None = None
        self.form = stored_as(CODEC_NONE if codec == CODEC_AUTO else codec, memory.layout)  # `auto` is exact

    def warm_up(self) -> None:
        """Loading what packs blocks may take seconds, and must not be taken for the codec's speed."""
        layout, codec = self._memory.layout, CODEC_LOSSLESS if self._setting == CODEC_AUTO else self._setting
        if not is_loaded(codec, layout, self._memory):
            load(codec, layout, layout)

    def codec(self) -> str:
        """What the next block should be packed by."""
        if self._setting != CODEC_AUTO:
            return self._setting
        return choose_codec(self.outgoing.bandwidth_bytes_per_s, self._lossless)

    def frame(self, key: BlockKey, block_id: BlockId, num_tokens: int, *, packs: bool = True) -> Frame:
        """The payload lies in the node's cache where the codec leaves it as it is, and else in memory of its own.
        Any thread may call it."""
        codec = self.codec() if packs else CODEC_NONE
        if codec == CODEC_LOSSLESS:
            payload = self._shrunk(self._memory.read(block_id))
        else:
            payload = encode_from(self._memory, block_id, codec)
        return Frame(pack(self._header(codec, key, num_tokens, payload)), payload)

    def _header(self, codec: str, key: BlockKey, num_tokens: int, payload: memoryview) -> BlockHeader:
        return BlockHeader(
            kv_identity=self._kv_identity,
            layout=self._memory.layout,
            key=key,
            num_tokens=num_tokens,
            payload_bytes=payload.nbytes,
            checksum=checksum_of(payload),
            sender_epoch=self._epoch,
            codec=codec,
        )

    def _shrunk(self, plain: memoryview) -> memoryview:
        started_s = self._clock()
        payload = encode(CODEC_LOSSLESS, plain, self._memory.layout)
        self._note(plain.nbytes, payload.nbytes, self._clock() - started_s)
        return payload

    def _note(self, num_plain_bytes: int, num_bytes: int, seconds: float) -> None:
        new = CodecSpeed(num_plain_bytes / max(seconds, 1e-9), num_plain_bytes / max(num_bytes, 1))
        old = self._lossless or new
        self._lossless = CodecSpeed(0.9 * old.bytes_per_s + 0.1 * new.bytes_per_s, 0.9 * old.ratio + 0.1 * new.ratio)
