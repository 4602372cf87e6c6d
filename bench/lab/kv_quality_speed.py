"""How fast codecs are on given blocks, beside a plain copy of them in the same rounds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvasir.bench.lab.kv_quality_engine import header_of
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.rounds import in_turns, median_ratio, seconds
from kvasir.engine.blocks import KVLayout
from kvasir.kv_connector.codec import decode, encode


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one codec, in bytes of the block; medians over the rounds. Ratios to a copy: above 1 is faster."""

    size: float  # of the payload, as a share of the block
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    encode_ratio: float
    decode_ratio: float

    @property
    def pays_below_bits_per_s(self) -> float:
        """The bandwidth below which encode, send, decode, one after the other, take less time than sending as it is."""
        return 8 * (1 - self.size) / (1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s)


def measure_speed(
    blocks: Sequence[bytes], layout: KVLayout, codecs: Sequence[str], num_rounds: int, quiet: Quiet
) -> dict[str, Speed]:
    """One thread."""
    views = [memoryview(block) for block in blocks]
    touched = [np.zeros(len(block), np.uint8) for block in blocks]
    payloads = {codec: [encode(codec, view, layout) for view in views] for codec in codecs}
    headers = {codec: [header_of(codec, one, layout, layout.block_size) for one in payloads[codec]] for codec in codecs}

    def copy() -> None:
        for view, to in zip(views, touched, strict=True):
            np.copyto(to, np.frombuffer(view, np.uint8))

    def encode_all(codec: str) -> None:
        for view in views:
            encode(codec, view, layout)

    def decode_all(codec: str) -> None:
        for header, payload in zip(headers[codec], payloads[codec], strict=True):
            decode(header, payload, layout)

    works = {("copy", ""): partial(seconds, copy)}
    works |= {("encode", codec): partial(seconds, partial(encode_all, codec)) for codec in codecs}
    works |= {("decode", codec): partial(seconds, partial(decode_all, codec)) for codec in codecs}
    times_s = in_turns(works, num_rounds, quiet)
    num_bytes = len(blocks) * layout.bytes_per_block
    return {
        codec: Speed(
            size=sum(payload.nbytes for payload in payloads[codec]) / num_bytes,
            encode_bytes_per_s=num_bytes / statistics.median(times_s["encode", codec]),
            decode_bytes_per_s=num_bytes / statistics.median(times_s["decode", codec]),
            encode_ratio=median_ratio(times_s["copy", ""], times_s["encode", codec]),
            decode_ratio=median_ratio(times_s["copy", ""], times_s["decode", codec]),
        )
        for codec in codecs
    }
