"""Makes frames of a node's blocks, packed by the configured codec, or by the one that pays (`auto`)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvasir.engine.blocks import BlockId
from kvasir.kv_connector.base import BlockHeader, BlockKey, BlockMemory, Frame
from kvasir.kv_connector.codec import encode, encode_from, is_loaded, load
from kvasir.kv_connector.costs import RateMeter
from kvasir.kv_connector.forms import CODEC_AUTO, CODEC_LOSSLESS, CODEC_NONE, codec_for, stored_as
from kvasir.kv_connector.header import checksum_of, pack

_NO_CODEC_PAYS_BYTES_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Measured while encoding. Decoding is assumed to be as fast."""

    bytes_per_s: float
    ratio: float  # size before / size after


def choose_codec(bandwidth_bytes_per_s: float | None, lossless: CodecSpeed | None) -> str:
    """The codec setting `auto`: lossless if packing and unpacking take less time than the smaller block saves.

    While the bandwidth is not known, nothing is packed. While the codec's speed is not known, it is used if the
    bandwidth is low, which measures it.
    """
    if bandwidth_bytes_per_s is None or bandwidth_bytes_per_s >= _NO_CODEC_PAYS_BYTES_PER_S:
        return CODEC_NONE
    if lossless is None:
        return CODEC_LOSSLESS
    packing_s = 2 / lossless.bytes_per_s
    saved_s = (1 - 1 / max(lossless.ratio, 1e-9)) / bandwidth_bytes_per_s
    return CODEC_LOSSLESS if packing_s < saved_s else CODEC_NONE


class Encoder:
    """`outgoing` measures the bandwidth of outgoing blocks, by which `auto` decides."""

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
        """Load the codec now: that may take seconds, which must not be measured as the codec's speed."""
        layout, codec = self._memory.layout, CODEC_LOSSLESS if self._setting == CODEC_AUTO else self._setting
        if not is_loaded(codec, layout, self._memory):
            load(codec, layout, layout)

    def codec(self) -> str:
        """The codec for the next block."""
        if self._setting != CODEC_AUTO:
            return self._setting
        return choose_codec(self.outgoing.bandwidth_bytes_per_s, self._lossless)

    def frame(self, key: BlockKey, block_id: BlockId, num_tokens: int, *, packs: bool = True) -> Frame:
        """Make a frame; may be called on any thread. packs=False: without a codec.

        An unpacked payload is the cache's own memory, a packed one a copy.
        """
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
